"""How long the rows are in the tokens of the model, and what follows for the limits of a recipe."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment_core.checks.rows import Question, ask
from alignment_core.data.pin import pin
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.models import Model
from alignment_core.recipes import DataConfig
from alignment_core.stages.dataset import DatasetConfig

NO_LIMIT = 1 << 30
ROUND = 32
"""Limits are multiples of it."""
MOST_BYTES = 8 << 20
"""Of rows that are measured."""
MOST_CUT = 0.05
"""Share of the rows that may be too long before they are cut instead of dropped."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the sequences that training makes of the first rows, each list ascending."""

    rows: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    problem: str | None = None
    """Why they were not measured."""
    warnings: tuple[str, ...] = ()
    """Sentences about fields that nothing reads."""

    @property
    def longest(self) -> int:
        """Of the rows; 0 where they were not measured."""
        return self.rows[-1] if self.rows else 0

    def longer(self, most: int) -> float:
        """The share of the rows that are longer."""
        return sum(length > most for length in self.rows) / len(self.rows) if self.rows else 0.0


def share(lengths: Sequence[int], part: float) -> int:
    """What so large a part of some ascending lengths does not exceed."""
    return lengths[min(len(lengths) - 1, int(part * len(lengths)))] if lengths else 0


def rounded(length: float) -> int:
    """The next multiple of :data:`ROUND`."""
    return max(ROUND, -(-int(length) // ROUND) * ROUND)


def measure(
    rows: Sequence[Mapping[str, Any]],
    reading: ColumnMapping,
    model: Model,
    settings: Mapping[str, Any],
    template: str | None,
) -> Lengths:
    """What the tokenizer makes of the rows, in a process of its own."""
    if model.tokenizer is None:
        return Lengths(problem=model.problem)
    with tempfile.TemporaryDirectory(prefix="align-init-") as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w") as lines:
            size = 0
            for row in rows:
                size += lines.write(json.dumps(row, default=str) + "\n")
                if size > MOST_BYTES:
                    break
        data = DataConfig.model_validate(
            {
                "sources": [{"path": str(file), "columns": reading.columns, "format": reading.format}],
                "max_length": NO_LIMIT,
                "max_bad_rows": 0.9,
                "prompt_template": template,
            }
        )
        sources = tuple(map(pin, data.sources))
        dataset = DatasetConfig(data=data, sources=sources, kind=reading.kind, settings=dict(settings))
        with closing(ask([Question(label="rows", dataset=dataset, tokenizer=model.tokenizer)])) as answers:
            answer = next(answers)
    if answer.problem or answer.unseen:
        return Lengths(problem=answer.problem or answer.unseen)
    return Lengths(
        sorted(head + (tail or 0) for head, tail in answer.sequences),
        sorted(head for head, _ in answer.sequences),
        sorted(tail for _, tail in answer.sequences if tail is not None),
        warnings=tuple(answer.warnings),
    )
