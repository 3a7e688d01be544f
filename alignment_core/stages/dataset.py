"""Stage: rows from sources → a data set of token ids with its statistics."""

from __future__ import annotations

from typing import Any

from alignment_core.data.formats import Purpose
from alignment_core.data.pin import PinnedSource
from alignment_core.recipes import DataConfig
from alignment_core.stages.base import Stage, StageConfig, StageContext


class DatasetConfig(StageConfig):
    """Pinned sources and how to read them."""

    data: DataConfig
    sources: tuple[PinnedSource, ...]
    purpose: Purpose
    trust_remote_code: bool = False

    def content(self) -> Any:
        return {
            "data": self.data.model_dump(mode="json", exclude={"sources"}),
            "sources": [source.content() for source in self.sources],
            "purpose": self.purpose,
        }


def run(context: StageContext, config: DatasetConfig) -> dict[str, Any]:
    import transformers

    from alignment_core.data.build import build, write

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        context.inputs["tokenizer"], trust_remote_code=config.trust_remote_code
    )
    with context.machines.processor(context.turn) as give_way:

        def progress(done: float, total: float | None) -> None:
            give_way()
            context.report(done, total, "rows")

        built = build(
            config.data,
            config.sources,
            tokenizer,
            config.purpose,
            context.seed,
            progress,
        )
        write(built, context.output)
    rows = built.statistics["rows"]
    return {"train_rows": rows["train"], "test_rows": rows["test"], "dropped": built.statistics["dropped"]}


STAGE = Stage("dataset", 1, "dataset", DatasetConfig, run)
