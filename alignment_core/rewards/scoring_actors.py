"""Models that score completions in actors of their own, and comparison of their tokenizers with the policy's."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from alignment_core.cluster.actor import call
from alignment_core.cluster.device import is_sharded
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import UserError
from alignment_core.models.microbatch import Images, Pair
from alignment_core.models.model_ref import Model
from alignment_core.models.same_tokenizer import other_token
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.rewards.base import OpensScores, Rows, Scores

if TYPE_CHECKING:
    from alignment_core.training.forward import Forward, ForwardJob

COMPARED = 64
"""Number of completions that are decoded to compare tokenizers."""
BLOCK = 256
"""Completions per forward call of one actor: few, because a killed actor loses its call."""


class StartsJudges(Protocol):
    """See :class:`alignment_core.execution.warm_actors.WarmActors`."""

    def judges(
        self, name: str, names: Sequence[str], job: ForwardJob, resources: ResourcesConfig
    ) -> AbstractContextManager[Scores]: ...


def in_actors(actors: StartsJudges, names: Sequence[str], resources: ResourcesConfig) -> OpensScores:
    """Opens reward models with these names in actors of their own, beside the trainers or engines that the caller holds."""

    def opened(model: Model, name: str, verdicts: tuple[int, int] | None = None) -> AbstractContextManager[Scores]:
        from alignment_core.training.forward import ForwardJob

        job = ForwardJob(model, "lm" if verdicts else "score", verdicts=verdicts)
        return actors.judges(name, names, job, resources)

    return opened


class Judges:
    """Actors that hold a reward model each; calls have a deadline."""

    def __init__(self, group: ActorGroup[Forward], resources: ResourcesConfig) -> None:
        self.group = group
        self.resources = resources
        # Ranks of a sharded model must get the calls of several threads in one order.
        self._alone = threading.Lock() if is_sharded(resources, group.size) else nullcontext()

    def __call__(self, pairs: Sequence[Pair]) -> Sequence[float]:
        """The score of each pair, in blocks that are spread over the actors."""
        from alignment_core.training.forward import Forward
        from alignment_core.training.ranks import run_blocks

        blocks = {first: pairs[first : first + BLOCK] for first in range(0, len(pairs), BLOCK)}
        calls = ((first, call(Forward.run, block)) for first, block in blocks.items())
        with self._alone:
            results = dict(run_blocks(self.group, calls, self.resources))
        scores = {first: np.sum(values, axis=0, dtype=np.float32) for first, values in results.items()}
        values: list[float] = np.concatenate([scores[first] for first in blocks]).tolist()
        return values


def pairs_of(rows: Rows) -> list[Pair]:
    """The tokens of each row, and the images of its prompt."""
    return [(row["prompt_ids"], row["completion_ids"], *_images(row)) for row in rows]


def _images(row: Mapping[str, Any]) -> list[Images]:
    return [Images(row["images"])] if row.get("images") else []


def check_tokenizer(model: Model, role: str, rows: Rows) -> None:
    """Raise UserError if the policy's token ids do not mean the same to a model that computes their probability."""
    if (other := _misread(model.tokenizer(), rows)) is not None:
        read, wrote = other
        raise UserError(
            f"the {role} has another tokenizer than the policy: it reads {read[:40]!r} where the policy wrote {wrote[:40]!r}; "
            "give one with the policy's tokenizer"
        )


def has_another_tokenizer(model: Model, policy: Any) -> bool:
    """Whether some token of the policy's tokenizer is another one, or none, for the model."""
    return other_token(policy, model.tokenizer()) is not None


def _misread(tokenizer: Any, rows: Rows) -> tuple[str, str] | None:
    """A completion as a tokenizer decodes it and as the policy wrote it, if they differ for any; otherwise None.

    White space and special tokens do not count: tokenizers with the same tokens may decode those differently.
    """
    special = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)

    def letters(text: str) -> str:
        for token in special:
            text = text.replace(token, "")
        return "".join(text.split())

    for row in rows[:: max(1, len(rows) // COMPARED)]:
        # Without a special token, the bytes on both sides of it may form a character.
        reads = [tokenizer.decode(row["completion_ids"], skip_special_tokens=skips) for skips in (False, True)]
        if letters(row["completion_text"]) not in map(letters, reads):
            return reads[0], row["completion_text"]
    return None
