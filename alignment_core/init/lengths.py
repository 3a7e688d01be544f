"""The lengths of rows in the model's tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment_core.checks.rows import Question, ask
from alignment_core.data.pin import pin
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.images import copied
from alignment_core.init.models import Model
from alignment_core.init.rows import Rows
from alignment_core.recipes import DataConfig
from alignment_core.stages.dataset import DatasetConfig

NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Lengths:
    """Tokens of the training sequences of the first rows, each list ascending."""

    rows: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    problem: str | None = None
    """Why the rows were not measured."""
    warnings: tuple[str, ...] = ()
    """Sentences about fields that the chat template does not show."""
    thinks: bool = False
    """Whether the model's chat template knows of thoughts before an answer."""

    @property
    def longest(self) -> int | None:
        return self.rows[-1] if self.rows else None


def measure(data: Rows, mapping: ColumnMapping, model: Model, settings: Mapping[str, Any]) -> Lengths:
    """Tokenize the first rows in a process of its own, which keeps the tokenizers out of this one."""
    if model.tokenizer is None:
        return Lengths(problem=model.problem)
    with tempfile.TemporaryDirectory(prefix="align-init-") as folder:
        # a copy of the first rows: to read from the source itself would hash all of its files again
        file = Path(folder) / "rows.jsonl"
        rows = copied(data.first, mapping.columns, data, file.parent) if mapping.images else data.first
        if rows is None:
            return Lengths(problem="their images are in several folders, or beside rows at an address")
        file.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        config = DataConfig.model_validate(
            {
                "sources": [{"path": str(file), "columns": mapping.columns, "format": mapping.format}],
                "max_length": NO_LIMIT,
                "max_bad_rows": 0.9,
                "prompt_template": mapping.template,
            }
        )
        sources = tuple(map(pin, config.sources))
        dataset = DatasetConfig(data=config, sources=sources, kind=mapping.kind, settings=dict(settings))
        question = Question(label="rows", dataset=dataset, tokenizer=model.tokenizer, reads_images=mapping.images)
        with closing(ask([question])) as answers:
            answer = next(answers)
    if answer.problem or answer.unseen:
        return Lengths(problem=answer.problem or answer.unseen)
    return Lengths(
        sorted(prompt + (completion or 0) for prompt, completion in answer.sequences),
        sorted(prompt for prompt, _ in answer.sequences),
        sorted(completion for _, completion in answer.sequences if completion is not None),
        warnings=tuple(answer.warnings),
        thinks=answer.thinks,
    )
