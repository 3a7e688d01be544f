"""Which rows to read, how to read them, and which of them to keep."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator

from alignment_core.recipes.base import Config, NameOf
from alignment_core.recipes.paths import Anything, RowsPath

RowFormat = Annotated[str, NameOf(("auto",), lambda: import_module("alignment_core.data.kinds").formats())]
"""A format that some kind of rows can be read from, or ``auto``."""


class DataSource(Config):
    """One source of rows. A bare string in a recipe stands for ``path``."""

    path: RowsPath | None = None
    """Hub name (`Anthropic/hh-rlhf`), a JSONL, Parquet or CSV file, a folder of such files, or an Arrow folder.
    Relative to the recipe's file."""
    task: str | None = None
    """Name of a built-in procedural task whose answers can be verified."""
    reasoning_gym: str | None = Field(None, exclude_if=lambda name: name is None)
    """Name of a task of reasoning-gym (extra `environments`), for prompts; scored by `verifier: reasoning_gym`."""
    verifiers: str | None = Field(None, exclude_if=lambda name: name is None)
    """Name of a taskset of verifiers (extra `environments`), for prompts; its environments give the reward."""
    format: RowFormat = "auto"
    """Format of the rows; `auto` infers it from the columns of the first row."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column names by role, where they differ from the role: `{prompt: question, completion: answer}`."""
    split: str = "train"
    """Split of a Hub data set, or `train` or `test` of a procedural task."""
    subset: str | None = None
    """Configuration name of a Hub data set."""
    revision: str | None = None
    """Branch, tag or commit of a Hub data set, pinned when the run starts."""
    rows: int | None = Field(None, ge=1)
    """Use at most this many rows; for a procedural task, the number of rows to generate (default 1000)."""
    weight: float | None = Field(None, gt=0)
    """Probability of this source in the mixture; give it for every source or for none."""
    options: dict[str, Anything] = Field(default_factory=dict)
    """Options of a procedural task, such as the share of correct demonstrations, or of a taskset of verifiers."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def shorthands(cls, fields: dict[str, Any], handler: GetJsonSchemaHandler) -> list[dict[str, Any]]:
        return [{"type": "string", "title": "Path"}]

    @property
    def origin(self) -> str | None:
        """Where rows come from that no built-in task makes."""
        return self.path or self.reasoning_gym or self.verifiers

    @model_validator(mode="after")
    def _one_origin(self) -> DataSource:
        if sum(origin is not None for origin in (self.path, self.task, self.reasoning_gym, self.verifiers)) != 1:
            raise ValueError(
                "give exactly one of `path` (file, folder or Hub name), `task` (a built-in task), `reasoning_gym` "
                "and `verifiers`"
            )
        if self.options and self.path is not None:
            raise ValueError("`options` belong to a `task`, to `reasoning_gym` or to `verifiers`, not to a `path`")
        if self.path is None:
            self.refuse_unused(("subset", "revision"), "without a data set of the Hub in `path`")
        return self


class DataConfig(Config):
    """A data set: sources, mixture, filters, split. A bare string or list in a recipe stands for ``sources``."""

    sources: tuple[DataSource, ...] = Field(min_length=1)
    """Where the rows come from."""
    chat_template: str | None = None
    """Jinja chat template for these rows. Default: the tokenizer's own, or plain text if it has none."""
    max_length: int = Field(1024, ge=2)
    """Maximum length of a row in tokens, prompt and completion together."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Maximum length of a prompt in tokens. Default: only `max_length` counts."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Drop rows that are too long, or truncate them (prompts from the left, completions from the right)."""
    max_bad_rows: float = Field(0.0, ge=0, lt=1)
    """Largest share of malformed rows that may be skipped; with more, the data set is refused."""
    mixing: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """With weights: stop when the first source is exhausted, or repeat the smaller ones until all have been read."""
    test_rows: int = Field(0, ge=0)
    """Approximate number of rows to hold out for evaluation. They are chosen by the digest of their prompt, so that no
    prompt is in both splits."""
    shuffle: bool = True
    """Shuffle the rows (by the recipe's seed)."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"sources": [value]}
        if isinstance(value, (list, tuple)):
            return {"sources": value}
        if isinstance(value, dict) and {"path", "task", "reasoning_gym", "verifiers"} & value.keys():
            if "sources" in value:
                raise ValueError("give either `sources` or the origin of the only source")
            source_fields = {key: item for key, item in value.items() if key in DataSource.model_fields}
            return {"sources": [source_fields], **{k: v for k, v in value.items() if k not in source_fields}}
        return value

    @classmethod
    def shorthands(cls, fields: dict[str, Any], handler: GetJsonSchemaHandler) -> list[dict[str, Any]]:
        source = fields["properties"]["sources"]["items"]
        of_source = handler.resolve_ref_schema(source)["anyOf"][0]
        fields["properties"] = {**of_source["properties"], **fields["properties"]}
        fields.pop("required", None)  # `sources`, or the fields of the only one
        return [{"type": "string", "title": "Path"}, {"type": "array", "items": source, "title": "Sources"}]

    @model_validator(mode="after")
    def _weights_of_all_or_none(self) -> DataConfig:
        given = [source.weight is not None for source in self.sources]
        if any(given) and not all(given):
            raise ValueError("give `weight` for every source or for none")
        if not any(given):
            self.refuse_unused(("mixing",), "without a `weight` of each source: every row is used once")
        return self
