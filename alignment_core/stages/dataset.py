"""Stage: rows from sources → a data set of token ids with its statistics."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field, field_validator

from alignment_core.data import kinds
from alignment_core.data.context import context_length, embedding_rows
from alignment_core.data.origins import ORIGINS
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.data.rows_file import ROWS
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.recipes import DataConfig, DataSource


class DatasetConfig(StageConfig):
    """Pinned sources and how to read them; no sources if the rows come from an input."""

    data: DataConfig
    sources: tuple[PinnedSource, ...]
    kind: str = Field(validation_alias=AliasChoices("kind", "purpose"))
    """Kind of the rows, see :mod:`alignment_core.data.kinds`."""
    settings: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda settings: not settings)
    """Settings of this kind of rows beside ``data``. Not part of the key if empty."""

    @field_validator("kind")
    @classmethod
    def _of_earlier_versions(cls, kind: str) -> str:
        """Records of earlier versions have the purpose of a data set, by which the stream of its kind is still called."""
        return next((name for name in kinds.KINDS.loaded()[0] if kind == kinds.stream(name)), kind)

    def content(self) -> Any:
        return {
            "data": self.data.model_dump(mode="json", exclude={"sources"}),
            "sources": [source.content() for source in self.sources],
            "kind": self.kind,
            **({"settings": self.settings} if self.settings else {}),
        }

    def code_used(self) -> tuple[str, ...]:
        origins = {source.source.field for source in self.sources} or {"path"}  # of an input's file
        return (kinds.KINDS.module(self.kind), *map(ORIGINS.module, sorted(origins)))


def run(context: StageContext, config: DatasetConfig) -> dict[str, Any]:
    from alignment_core.data.build import build, write
    from alignment_core.data.statistics import account, losses
    from alignment_core.data.turn_end import keep_chat_template

    model = context.model("tokenizer")
    tokenizer = model.tokenizer()
    with context.machines.processor(context.ticket) as give_way:

        def progress(done: float, total: float | None) -> None:
            give_way()
            context.report(done, total, "rows")

        built = build(
            config.data,
            _sources(context, config),
            tokenizer,
            config.kind,
            context.seed,
            progress,
            context_length(context.inputs["tokenizer"]),
            config.settings,
            context.progress,
            embedding_rows(context.inputs["tokenizer"]),
            model.image_processor(),
        )
        write(built, context.output)
    if config.data.chat_template is not None:
        keep_chat_template(config.data.chat_template, context.output)
    rows = built.statistics["rows"]
    notes = dict.fromkeys(f"{source.name}: {note}" for source in config.sources for note in source.notes)
    warnings = [*notes, *losses(built.statistics, config.data.mixing, config.data.test_rows)]
    return {
        "rows": account(built.statistics),
        **{f"{name}_rows": rows[name] for name in ("read", "train", "test", "unused")},
        "dropped": built.statistics["dropped"],
        **({"images": images} if (images := built.statistics.get("images")) else {}),
        **({"shortened": shortened} if (shortened := built.statistics["shortened"]) else {}),
        **({"warnings": warnings} if warnings else {}),
    }


def _sources(context: StageContext, config: DatasetConfig) -> tuple[PinnedSource, ...]:
    if "rows" not in context.inputs:
        return config.sources
    return (pin(DataSource(path=str(context.inputs["rows"] / ROWS), format=kinds.load(config.kind).native)),)


SHOWS = {"rows": "train rows"}
STAGE = Stage(
    "dataset",
    1,
    {"dataset": "dataset"},
    DatasetConfig,
    run,
    SHOWS,
    packages=("datasets", "jinja2", "tokenizers", "transformers"),
)
