"""Reward models that score completions, each in actors of its own or in the trainers' place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from alignment_core.cluster.group import ActorGroup, call
from alignment_core.errors import UserError
from alignment_core.models.handle import Model
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.rewards.base import Opening, Pair, Rows, Scores
from alignment_core.rewards.failures import Answers

if TYPE_CHECKING:
    from alignment_core.training.forward import Forward, ForwardJob

COMPARED = 64
"""Completions that are read again to compare tokenizers."""
BLOCK = 256
"""Completions per forward call of one actor: what a kill may cost, so not many."""


class Judge:
    """The reward that a model gives."""

    def __init__(self, scores: Scores, close: Callable[[], None] = lambda: None) -> None:
        """``close`` ends its actors."""
        self._scores, self.close = scores, close

    @classmethod
    def open(cls, opening: Opening) -> Judge:
        """Raises UserError for a model with another tokenizer than the policy's."""
        assert opening.model is not None
        assert opening.scores is not None
        role, prompts = f"reward model of {opening.field}", _prompts_as_completions(opening)
        check_tokenizer(opening.model, role, prompts)
        held = ExitStack()
        scores = held.enter_context(opening.scores(opening.model, f"reward-{opening.field.rpartition('.')[2]}"))
        return cls(scores, held.close)

    def __call__(self, rows: Rows) -> Answers:
        pairs, places = distinct(rows)
        yield from enumerate(np.asarray(self._scores(pairs))[places].tolist())


class Machines(Protocol):
    """What hands out actors; see :mod:`alignment_core.execution.machines`."""

    def judges(self, name: str, job: ForwardJob, resources: ResourcesConfig) -> AbstractContextManager[Scores]: ...


def in_actors(machines: Machines, resources: ResourcesConfig) -> Callable[[Model, str], AbstractContextManager[Scores]]:
    """How a reward model is opened in actors of its own, beside the trainers or engines that the caller holds."""

    def opened(model: Model, name: str) -> AbstractContextManager[Scores]:
        from alignment_core.training.forward import ForwardJob

        return machines.judges(name, ForwardJob(model, "score"), resources)

    return opened


class Judges:
    """Actors that hold a reward model each, as their caller sees them, each call with its deadline."""

    def __init__(self, group: ActorGroup[Forward], timeout: float) -> None:
        """``timeout``: seconds for one call."""
        self.group, self.timeout = group, timeout

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[float]:
        """The score of each pair, in blocks that are spread over the actors."""
        from alignment_core.training.forward import Forward

        blocks = {first: pairs[first : first + BLOCK] for first in range(0, len(pairs), BLOCK)}
        calls = ((first, call(Forward.run, block)) for first, block in blocks.items())
        found = dict(self.group.spread(calls, self.timeout))
        values: list[float] = np.concatenate([found[first] for first in blocks]).tolist()
        return values


def distinct(rows: Rows) -> tuple[list[Pair], list[int]]:
    """The different (prompt ids, completion ids) among ``rows``, and where each row's pair is among them."""
    asked = [(tuple(row["prompt_ids"]), tuple(row["completion_ids"])) for row in rows]
    pairs = list(dict.fromkeys(asked))
    numbers = {pair: number for number, pair in enumerate(pairs)}
    return pairs, [numbers[pair] for pair in asked]


def check_tokenizer(model: Model, role: str, rows: Rows) -> None:
    """The token ids of the policy must mean the same to the model that scores them. Raises UserError."""
    tokenizer = model.tokenizer()
    for row in rows[:: max(1, len(rows) // COMPARED)]:
        read = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        if read != row["completion_text"]:
            raise UserError(
                f"the {role} has another tokenizer than the policy: it reads {read[:40]!r} where the "
                f"policy wrote {row['completion_text'][:40]!r}; give one with the policy's tokenizer"
            )


def _prompts_as_completions(opening: Opening) -> list[dict[str, Any]]:
    """Prompts as if they were completions, for a look at what tokens mean."""
    return [
        {
            "completion_ids": prompt["prompt_ids"],
            "completion_text": opening.tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=True),
        }
        for prompt in opening.prompts
    ]
