"""Requests for completions, and the completions that engines sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alignment_core.columns import parts


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    name: str
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Completion:
    """One sampled completion. Token ids [T] and their log-probabilities [T] under the sampling distribution."""

    token_ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    """[T] Version of the weights that each token was sampled with."""
    finish_reason: str

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logps) == len(self.versions):
            raise RuntimeError(f"{len(self.token_ids)} sampled tokens have {len(self.logps)} log-probabilities")


@dataclass(frozen=True)
class Completions:
    """Several completions as columns, one after the other, in which they travel between processes."""

    token_ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    ends: np.ndarray
    """[C] End of each completion in the columns."""
    finish_reasons: list[str]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Completions:
        """The columns of these completions."""
        return cls(
            np.concatenate([one.token_ids for one in completions]),
            np.concatenate([one.logps for one in completions]),
            np.concatenate([one.versions for one in completions]),
            np.cumsum([len(one.token_ids) for one in completions]),
            [one.finish_reason for one in completions],
        )

    def each(self) -> list[Completion]:
        """The completions, as views of the columns."""
        columns = [parts(column, self.ends) for column in (self.token_ids, self.logps, self.versions)]
        return [Completion(*one) for one in zip(*columns, self.finish_reasons, strict=True)]
