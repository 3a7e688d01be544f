"""Documents: plain texts of any length. One that is longer than ``max_length`` becomes several rows, its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from alignment_core.data.kinds import Format
from alignment_core.data.kinds.texts import Texts
from alignment_core.data.limits import Limits
from alignment_core.data.overlap import digest_of_text
from alignment_core.data.tasks import TASKS, Problem, split_of

BLOCK_OVERLAP = "block_overlap"
"""The setting: how many tokens of the block before a block begins with, for context. They are no targets."""
PROBLEMS = 8
"""How many problems of a built-in task make a document."""


@dataclass(frozen=True)
class Document:
    """A text to train on, all of it."""

    text: str

    def prompts(self) -> tuple[str, ...]:
        return (digest_of_text(self.text),)

    def rows(self, limits: Limits) -> list[dict[str, Any] | str]:
        """Its blocks. Every token and the EOS behind them are a target once, but for a first token without BOS before it.

        A block begins with BOS if the tokenizer puts that before a text; otherwise with the last token of the block before,
        as something has to precede its first target.
        """
        if not self.text.strip():
            return ["empty_document"]
        renderer = limits.renderer
        bos, whole = renderer.bos, renderer.join("", [(self.text, True)], empty=False)
        ids = whole.input_ids[len(bos) :] if bos and whole.input_ids[: len(bos)] == bos else whole.input_ids
        first = 0 if bos else 1
        overlap = max(first, limits.settings.get(BLOCK_OVERLAP, 0))
        cuts = list(blocks(len(ids), limits.config.max_length - len(bos), overlap, first))
        return [
            {
                "input_ids": (block := bos + ids[begin:end]),
                "loss_mask": [0] * (len(block) - (end - start)) + [1] * (end - start),
                "text": whole.text if len(cuts) == 1 else renderer.decode(block),
            }
            for begin, start, end in cuts
        ] or ["empty_document"]


def blocks(tokens: int, room: int, overlap: int, first: int) -> Iterator[tuple[int, int, int]]:
    """Cut a text of so many ``tokens``, of which number ``first`` is the first target, into blocks of at most ``room``.

    Of each block where it begins, its first target, and where it ends: ``overlap`` tokens, below ``room``, precede the first
    target if there are so many.
    """
    start = first
    while start < tokens:
        begin = max(0, start - overlap)
        end = min(tokens, begin + room)
        yield begin, start, end
        start = end


class Documents(Texts):
    """``source`` of a block is that of its document."""

    gives = "documents"
    formats = {"text": Format(("text",), lambda row: Document(row.text("text")))}
    reasons = {"empty_document": "have no text"}
    together = "document"

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        """The problem and others of its task and split, each with an answer, one below the other."""
        return {"text": "\n".join(each.prompt + each.attempt() for each in _and_others(problem))}


def _and_others(problem: Problem) -> Iterator[Problem]:
    yield problem
    split = split_of(problem.prompt)
    count = 1
    while count < PROBLEMS:
        question = TASKS[problem.task](problem.random)
        if split_of(question.prompt) == split:
            count += 1
            yield replace(problem, **vars(question))


KIND = Documents()
