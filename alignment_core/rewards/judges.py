"""Reward models that score completions, each in actors of its own or in the trainers' place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from alignment_core.errors import UserError
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.rewards.base import Opening, Pair, Rows, Scores
from alignment_core.rewards.failures import Answers

FORWARD = "alignment_core.training.forward:Forward"
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
        check_tokenizer(opening.model, role, prompts, opening.trust_remote_code)
        held = ExitStack()
        scores = held.enter_context(opening.scores(opening.model, f"reward-{opening.field.rpartition('.')[2]}"))
        return cls(scores, held.close)

    def __call__(self, rows: Rows) -> Answers:
        pairs, places = distinct(rows)
        yield from enumerate(np.asarray(self._scores(pairs))[places].tolist())


class Machines(Protocol):
    """What hands out actors; see :mod:`alignment_core.execution.machines`."""

    @property
    def device(self) -> Any: ...

    def judges(self, name: str, factory: str, arguments: dict[str, Any]) -> AbstractContextManager[Any]: ...


def in_actors(
    machines: Machines, resources: ResourcesConfig, trust_remote_code: bool
) -> Callable[[Path, str], AbstractContextManager[Scores]]:
    """How a reward model is opened in actors of its own, beside the trainers or engines that the caller holds."""

    @contextmanager
    def opened(model: Path, name: str) -> Iterator[Scores]:
        from alignment_core.models.saving import checkpoint_dtype

        arguments = {
            "model": str(model),
            "head": "score",
            "bf16": checkpoint_dtype(model) != "float32",
            "token_budget": resources.max_tokens_per_microbatch,
            "device": machines.device,
            "trust_remote_code": trust_remote_code,
        }
        with machines.judges(name, FORWARD, arguments) as group:
            yield InActors(group, resources.wait_timeout_seconds)

    return opened


class InActors:
    """Scores of a group of :class:`~alignment_core.training.forward.Forward` actors."""

    def __init__(self, group: Any, wait: float) -> None:
        self.group, self.wait = group, wait

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[float]:
        jobs = [(first, (pairs[first : first + BLOCK],)) for first in range(0, len(pairs), BLOCK)]
        found = dict(self.group.spread("run", jobs, timeout=self.wait))
        values: list[float] = np.concatenate([found[first] for first, _ in jobs]).tolist()
        return values


def distinct(rows: Rows) -> tuple[list[Pair], list[int]]:
    """The different (prompt ids, completion ids) among ``rows``, and where each row's pair is among them."""
    asked = [(tuple(row["prompt_ids"]), tuple(row["completion_ids"])) for row in rows]
    pairs = list(dict.fromkeys(asked))
    numbers = {pair: number for number, pair in enumerate(pairs)}
    return pairs, [numbers[pair] for pair in asked]


def check_tokenizer(model: Path, role: str, rows: Rows, trust_remote_code: bool) -> None:
    """The token ids of the policy must mean the same to the model that scores them. Raises UserError."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
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
