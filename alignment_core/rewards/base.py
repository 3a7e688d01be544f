"""The interface of a kind of reward: its plug-in, the arguments of opening it, and the open reward."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from alignment_core.data.turn_end import TurnEnd
from alignment_core.models.microbatch import Pair
from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.rewards import REWARDS, RewardConfig
from alignment_core.rewards.results import Answers
from alignment_core.user_code.pool import Elsewhere

Rows = Sequence[dict[str, Any]]
"""Completions. Each has `prompt_text`, `completion_text`, `label`, `task`, `source`, `group` (which prompt of the step it
answers), `prompt_ids`, `completion_ids` (lists or arrays) and `finish_reason`, among others; also `messages`, `tools` and
`columns` of the prompt, as JSON (see :mod:`alignment_core.data.kinds.prompts`)."""


class Source(Protocol):
    """An open reward."""

    def __call__(self, rows: Rows) -> Answers:
        """The number of each row with its reward, in any order; from any thread, one call at a time."""

    def close(self) -> None:
        """End a call in progress in another thread, and everything that was started for it. May be called again."""


class Scores(Protocol):
    """The scores of a reward model for pairs, in their order."""

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[float]: ...


class OpensScores(Protocol):
    """Opens a reward model, with a name for its actors: ``reward-`` and the reward's number. With ``verdicts``, the ids of a
    token for good and one for bad, it is a language model, and scores are the log-odds of the first."""

    def __call__(
        self, model: Model, name: str, verdicts: tuple[int, int] | None = None
    ) -> AbstractContextManager[Scores]: ...


S = TypeVar("S", bound=Source)


@dataclass(frozen=True)
class Opening:
    """The resources of a reward while it is open."""

    field: str
    """Its field in the recipe, such as ``rl.rewards.0``."""
    resources: ResourcesConfig
    tokenizer: Any = None
    """The policy's."""
    turn_end: TurnEnd | None = None
    """The end of the policy's turns; None: any added token may end one."""
    chat_template: str | None = None
    """Chat template of the prompts, if it is not the tokenizer's own."""
    across_policies: bool = False
    """Whether scores are compared between policies with different chat templates, or none."""
    policy: str = "the policy"
    """Its name in messages."""
    prompts: Rows = ()
    """Rows whose ``prompt_ids`` the tokenizer made; ``prompt`` is their text."""
    images_in_observations: bool = False
    """Whether completions may have images."""
    model: Model | None = None
    """Its model, if it has one (see RewardConfig.model)."""
    elsewhere: Elsewhere | None = None
    """Starts pools of user functions on other nodes (see FunctionPool)."""
    scores: OpensScores | None = None
    """Only for kinds that need ``actors``."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """Sentences that the stage shows; rewards append to them."""
    starting: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    """A context for the time in which a reward starts something, with its name: the stage reports it as start-up."""
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set once the results are no longer needed."""
    progress: Path | None = None
    """The stage's folder of saved progress, if it rewards all its rows in one call."""

    def of_function(self, source: Callable[..., S], name: str, field: str) -> S:
        """A ``source`` that calls the function ``name`` of the reward's ``field``."""
        resources = self.resources
        return source(
            name,
            resources.reward_timeout_seconds,
            f"{self.field}.{field}",
            resources.reward_processes,
            elsewhere=self.elsewhere,
            load_timeout=resources.reward_load_timeout_seconds,
        )


C = TypeVar("C", bound=RewardConfig)


@dataclass(frozen=True)
class RewardKind(Generic[C]):
    """A kind of reward: the plug-in ``REWARD`` of its module."""

    config: type[C]
    open: Callable[[C, Opening], Source]
    """Raises UserError for missing settings or files, and EnvironmentFault for a deficiency of this machine or a server."""
    description: Callable[[C], str]
    """Its name in messages, such as "the function f.py:f"."""
    content: Callable[[C, str], dict[str, Any]] = lambda config, field: config.model_dump(mode="json")
    """The part of a configuration, at a recipe's field, that determines the rewards, for stage keys. Raises UserError."""
    code: Callable[[C], tuple[str, ...]] = lambda config: ()
    """Modules that compute the rewards, beside the one of ``config``."""
    packages: Callable[[C], tuple[str, ...]] = lambda config: ()
    """Distributions whose versions determine the rewards."""
    actors: bool = False
    """Whether it is opened only while the stage holds trainers or engines."""
    kept: bool = False
    """Whether answers are saved in ``Opening.progress`` as they come, because they cost time or money of another server."""
    reads_text: bool = False
    """Whether it reads texts, which show an image only as a placeholder: it is refused for prompts with images."""
    check_images: Callable[[Opening], None] = lambda opening: None
    """Raises UserError for a reward that would not see the images of prompts."""
    user_code: tuple[str, ...] = ()
    """Fields that name user functions, which are called on a few rows before a run starts."""

    def __post_init__(self) -> None:
        if (
            not issubclass(self.config, RewardConfig)
            or getattr(self.config, "KEY", None) not in self.config.model_fields
        ):
            raise TypeError(f"{self.config.__name__} is not a RewardConfig whose KEY is one of its fields")


def content_without_model(reward: RewardConfig, field: str) -> dict[str, Any]:
    """The ``content`` of a reward whose model is an input of the stage, so that the stage's key has it anyway."""
    return {**reward.model_dump(mode="json"), reward.KEY: True}


def kind_of(reward: RewardConfig) -> RewardKind[Any]:
    """The kind of a configuration."""
    return next(kind for kind in REWARDS.loaded()[0].values() if kind.config is type(reward))


def content(rewards: Sequence[RewardConfig], field: str) -> list[dict[str, Any]]:
    """The part of the rewards at ``field`` of the recipe that determines a result. Raises UserError."""
    return [kind_of(reward).content(reward, f"{field}.{number}") for number, reward in enumerate(rewards)]


def code_used(rewards: Sequence[RewardConfig]) -> tuple[str, ...]:
    """Modules that compute these rewards."""
    of_kinds = [(type(reward).__module__, *kind_of(reward).code(reward)) for reward in rewards]
    return tuple(dict.fromkeys(module for modules in of_kinds for module in modules))


def packages_used(rewards: Sequence[RewardConfig]) -> tuple[str, ...]:
    """Distributions whose versions determine these rewards."""
    return tuple(dict.fromkeys(name for reward in rewards for name in kind_of(reward).packages(reward)))
