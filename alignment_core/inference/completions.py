"""Requests for completions, and the completions that engines sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from alignment_core.columns import parts
from alignment_core.data.completion_text import Texts
from alignment_core.inference.decoding import Decoding


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    name: str
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int
    images: tuple[Path, ...] = ()
    """Paths of the images in the prompt, whose tokens ``prompt_ids`` holds, in their order."""


@dataclass(frozen=True)
class Completion:
    """One sampled completion. Token ids [T] and their log-probabilities [T] under the sampling distribution."""

    token_ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    """[T] Version of the weights that each token was sampled with."""
    finish_reason: str
    texts: Texts | None = None
    """None if it was not decoded where it was sampled."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logps) == len(self.versions):
            raise RuntimeError(f"{len(self.token_ids)} sampled tokens have {len(self.logps)} log-probabilities")

    def decoded(self, decoding: Decoding | None) -> Completion:
        """The same with its text, if there is a ``decoding``."""
        return replace(self, texts=decoding(self.token_ids, self.finish_reason)) if decoding else self


@dataclass(frozen=True)
class Completions:
    """Several completions, one after the other, as columns: the form in which they travel between processes."""

    token_ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    ends: np.ndarray
    """[C] End of each completion in the columns."""
    finish_reasons: list[str]
    texts: list[Texts | None]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Completions:
        """The columns of these completions."""
        return cls(
            np.concatenate([completion.token_ids for completion in completions]),
            np.concatenate([completion.logps for completion in completions]),
            np.concatenate([completion.versions for completion in completions]),
            np.cumsum([len(completion.token_ids) for completion in completions]),
            [completion.finish_reason for completion in completions],
            [completion.texts for completion in completions],
        )

    def each(self) -> list[Completion]:
        """The completions, as views of the columns."""
        columns = [parts(column, self.ends) for column in (self.token_ids, self.logps, self.versions)]
        return [Completion(*fields) for fields in zip(*columns, self.finish_reasons, self.texts, strict=True)]
