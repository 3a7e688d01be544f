"""Trial calls of each function of the user on a few rows, as a run makes them, to find broken functions before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from alignment_core.data.images import images_in_messages
from alignment_core.data.messages import as_given
from alignment_core.environments import calls as environment_calls
from alignment_core.environments.environments import ACT
from alignment_core.errors import UserError
from alignment_core.execution.base import SamplingPlan
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.base import Opening, kind_of
from alignment_core.rewards.results import Account
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.process import FunctionProcess

Rows = Sequence[dict[str, Any]]
Answers = Generator[Any, None, None]
SHOWN = 60
USUAL: float = RewardConfig.model_fields["max_failed"].default
"""With a higher `max_failed`, a function may be meant to refuse made-up completions."""

NOT_CALLED = object()
"""In the place of a row's answer."""


@dataclass(frozen=True)
class Called:
    """A function to call on the prompts of one data set."""

    field: str
    name: str
    max_failed: float
    """Fraction of the completions for which it may fail."""
    trial: Callable[[Rows, float], Answers]
    """Call it with a timeout in seconds; result or failure per row, or :data:`NOT_CALLED`."""

    def problem(self, rows: Rows, timeout: float) -> str | None:
        """A sentence if it cannot be loaded or fails on all ``rows``. Raises EnvironmentFault if this machine cannot run it."""
        failed = []
        try:
            with closing(self.trial(rows, timeout)) as answers:
                for row, answer in zip(rows, answers, strict=False):
                    if answer is NOT_CALLED:
                        continue
                    if not isinstance(answer, Failed):
                        return None
                    prompt = f"for the prompt {row['prompt_text'][:SHOWN]!r} of {row['source']}"
                    failed.append(f"{self.field}: {self.name} {answer}, {prompt}")
        except UserError as error:
            return str(error)
        return failed[0] if failed and self.max_failed <= USUAL else None


def called_by(
    rewards: Mapping[str, RewardConfig], sampling: SamplingPlan, resources: ResourcesConfig
) -> Iterator[Called]:
    """The user's functions among the rewards of samples, by their fields, and that of their environment. Endpoints are not
    called, nor rewards that need actors, such as a reward model."""
    for field, reward in rewards.items():
        kind = kind_of(reward)
        for name in () if kind.actors else kind.user_code:
            trial = _reward(reward, Opening(field, resources), sampling.generation.num_generations)
            yield Called(f"{field}.{name}", getattr(reward, name), reward.max_failed, trial)
    environment = sampling.environment
    if environment is not None and environment.name is not None:
        most = next((reward.max_failed for reward in rewards.values() if reward.of_environment), USUAL)
        yield Called(environment_calls.FIELD, environment.name, most, _environment(environment, resources))


def _reward(reward: RewardConfig, opening: Opening, generations: int) -> Any:
    """Rewards of the rows, each as a group of so many completions: a successful one per group, if there is one."""

    def trial(rows: Rows, timeout: float) -> Answers:
        account = Account(opening.field, reward.max_failed, opening.field, missing=reward.missing)
        resources = opening.resources.model_copy(update={"reward_timeout_seconds": timeout, "reward_processes": 1})
        with closing(kind_of(reward).open(reward, replace(opening, resources=resources))) as source:
            for number, row in enumerate(rows):
                group = [
                    {**row, "group": number, "prompt": number, "sample": sample, "finish_reason": "stop", "policy": ""}
                    for sample in range(generations)
                ]
                answers = [account.result(answer) for _, answer in source(group)]
                yield next((result for result in answers if not isinstance(result, Failed)), answers[0])

    return trial


def _environment(config: EnvironmentConfig, resources: ResourcesConfig) -> Any:
    """An episode for each row without images, whose files are gone by now; if all have some, the class is only loaded."""

    def trial(rows: Rows, timeout: float) -> Answers:
        loading = resources.reward_load_timeout_seconds
        process = FunctionProcess(ACT, timeout, environment_calls.FIELD, load_timeout=loading)
        with closing(process):
            has_images = [bool(images_in_messages(as_given(row))) for row in rows]
            if all(has_images):
                _load(process, config)
            for number, row in enumerate(rows):
                if has_images[number]:
                    yield NOT_CALLED
                    continue
                reset = ["reset", str(number), config.name, None, config.options, row["prompt_text"], row["label"]]
                for _, answer in process.answers([reset]):
                    yield answer
                for _ in process.answers([["close", str(number)]]):
                    pass

    return trial


def _load(process: FunctionProcess, config: EnvironmentConfig) -> None:
    """Raise UserError for an environment that cannot be loaded."""
    for _, answer in process.answers([["content", config.name, environment_calls.FIELD, config.options]]):
        problem = (
            f"{environment_calls.FIELD}: {config.name} {answer}"
            if isinstance(answer, Failed)
            else answer.get("problem")
        )
        if problem:
            raise UserError(problem)
