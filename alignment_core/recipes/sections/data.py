"""Which rows to read, how to read them, and which of them to keep."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from alignment_core.recipes.base import Config, NameOf, refuses_unused, unkeyed
from alignment_core.recipes.paths import Anything, RowsPath
from alignment_core.recipes.row_plugins import formats, origins
from alignment_core.recipes.sections.model import ChatTemplate

RowFormat = Annotated[str, NameOf(("auto",), formats)]
"""A format that some kind of rows can be read from, or ``auto``."""
TAKEN = frozenset({
    "prompt", "prompts", "prompt_text", "prompt_ids", "completion", "completions", "completion_text", "completion_ids",
    "messages", "columns", "label", "group", "sample", "policy", "finish_reason", "environment",
    "trainer_state", "log_extra", "log_metric",
})  # fmt: skip
"""Names that a reward function knows something else by: in our form or in TRL's. A kept column `task`, as in TRL's example of
functions for several tasks, or `source` takes the place of ours."""


PROMPT = "prompt"
"""The name of the user's text in a ``prompt_template``."""


def _checked_template(template: str) -> str:
    """The template. Raises ValueError if no row can fill it."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"`prompt_template` is not well formed: {error}; write {{{{ and }}}} for braces") from None
    names = [name for _, name, _, _ in parts if name is not None]
    if PROMPT not in names:
        raise ValueError("`prompt_template` has no {prompt}, so the prompts would all be alike")
    for _, name, spec, conversion in parts:
        if name is not None and (not name or conversion or "[" in name or "{" in (spec or "")):
            raise ValueError(
                f"`prompt_template`: {{{name}}} is not the name of a column, with `:` and a format at most"
            )
    return template


def with_parts(template: str, parts: Mapping[str, str]) -> str:
    """The ``prompt_template`` with ``parts``, which may be templates themselves, in place of the columns of these names."""
    text = []
    for literal, name, spec, _ in Formatter().parse(template):
        text.append(literal.replace("{", "{{").replace("}", "}}"))
        if name is not None:
            text.append(parts.get(name, f"{{{name}:{spec}}}" if spec else f"{{{name}}}"))
    return "".join(text)


class _NamesRows(Config):
    """What names rows, without the fields that origins add."""

    path: RowsPath | None = None
    """Hub name (`Anthropic/hh-rlhf`), a JSONL, Parquet or CSV file, a folder of such files, or an Arrow folder. A folder means
    what `datasets` means by it: splits by configurations in README.md, by shards in `data/`, by names of folders or files, and
    the most frequent suffix. Text formats may be compressed (`.jsonl.gz`, `.zst`). A `.txt` file, or each
    one of a folder of them, is a row with the column `text`. Relative to the recipe's file. Or an address:
    `s3://bucket/rows/*.parquet`, `gs://…`, `https://…`, `hf://datasets/…`."""
    task: str | None = None
    """Name of a built-in procedural task whose answers can be verified."""


def _name_of(origin: Any) -> Any:
    return (str | None, unkeyed(None, description=origin.description))


if TYPE_CHECKING:

    class _WithLibraries(_NamesRows):
        pass
else:
    _LIBRARIES = {
        field: _name_of(origin) for field, origin in origins().items() if field not in _NamesRows.model_fields
    }
    _WithLibraries = create_model(
        "_WithLibraries",
        __base__=_NamesRows,
        __module__=__name__,
        __doc__="What names rows, with the fields that origins add.",
        **_LIBRARIES,
    )


class DataSource(_WithLibraries):
    """One source of rows. A bare string in a recipe stands for ``path``."""

    format: RowFormat = "auto"
    """Format of the rows; `auto` infers it from the columns of the first row."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Column names by role, where they differ from the role: `{prompt: question, completion: answer}`."""
    keep_columns: tuple[str, ...] = ()
    """Further columns of prompts for reward functions, such as `[solution, difficulty]`. Every row must have them."""
    split: str = "train"
    """Split of a Hub data set or folder, or `train` or `test` of a procedural task."""
    subset: str | None = None
    """Configuration name of a Hub data set, or of a folder whose README.md has several."""
    revision: str | None = None
    """Branch, tag or commit on the Hub, pinned when the run starts."""
    rows: int | None = Field(None, ge=1)
    """Use at most this many rows. They are chosen by the digests of their content and the seed, because the first rows of a
    file are often all of one kind, and stay in the order of the source; all rows of the source are read for it. For the first
    rows of a Hub data set instead: `split: "train[:1000]"`. For a procedural task or a library of tasks without an end, the
    number of rows to generate (default 1000)."""
    weight: float | None = Field(None, gt=0)
    """Probability of this source in the mixture; give it for every source or for none."""
    held_out: bool = unkeyed(False)
    """Measure on all rows of this source instead of training on them: a test set of your own, in place of `test_rows`."""
    options: dict[str, Anything] = Field(default_factory=dict)
    """Options of a procedural task, such as the share of correct demonstrations, or of a taskset of verifiers,
    where `env:NAME` stands for the value of an environment variable."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def shorthands(cls, fields: dict[str, Any], handler: GetJsonSchemaHandler) -> list[dict[str, Any]]:
        return [{"type": "string", "title": "Path"}]

    @property
    def field(self) -> str:
        """The field by which it names its rows: the origin of these."""
        return next(field for field in origins() if getattr(self, field, None) is not None)

    @property
    def origin(self) -> str:
        """What it names them."""
        return str(getattr(self, self.field))

    @field_validator("keep_columns")
    @classmethod
    def _names_are_free(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name in TAKEN:
                raise ValueError(f"{name!r} already means something else to reward functions; rename the column")
        if len(set(names)) < len(names):
            raise ValueError("a column is named twice")
        return names

    @model_validator(mode="after")
    def _one_origin(self, info: ValidationInfo) -> DataSource:
        known = origins()
        given = [field for field in known if getattr(self, field, None) is not None]
        if len(given) != 1:
            *most, last = (f"`{field}`" for field in known)
            raise ValueError(
                f"give exactly one of {', '.join(most)} and {last}; `path` is a file, a folder or a Hub name, `task` a "
                "built-in task"
            )
        if self.options and not known[given[0]].has_options:
            others = [f"`{field}`" for field, origin in known.items() if origin.has_options]
            raise ValueError(f"`options` belong to {' or '.join(others)}, not to a `{given[0]}`")
        if self.path is None:
            self.refuse_unused(info, ("subset", "revision"), "unless `path` is a Hub data set")
        return self


class DataConfig(Config):
    """A data set: sources, mixture, filters, split. A bare string or list in a recipe stands for ``sources``."""

    sources: tuple[DataSource, ...] = Field(min_length=1)
    """Where the rows come from."""
    chat_template: ChatTemplate | None = None
    """Jinja chat template for these rows, or `plain` for rows that are plain text: the tokenizer encodes them, with BOS if it
    adds one. Default: the tokenizer's own template, or `plain` if it has none."""
    assistant_turns: Literal["all", "last"] = unkeyed("all")
    """Which of the assistant's turns of a conversation are trained on: all of them, or only the last. Turns with a weight of
    0 (`weight`, `train`, `loss_mask`, …) are never trained on."""
    completion_only_loss: bool = unkeyed(True)
    """For demonstrations of `prompt` and `completion`: train on the completion alone, or with `false` on the prompt, too (TRL's
    field of this name). Of `messages` the assistant's turns are trained on in any case."""
    prompt_template: Annotated[str, AfterValidator(_checked_template)] | None = unkeyed(None)
    """How a prompt is written, or the first message of the user: `{prompt}` with further columns of the row, such as
    `{prompt} [quality={quality:.0f}]`. A column that is empty or null is left out with white space before it. Default: the
    prompt alone. Rows are told apart by the prompt with the columns of text that only white space precedes, such as Alpaca's
    `input`; a number is an attribute of the answer."""
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
    """Approximate number of rows to hold out for evaluation. They are chosen by the digests of their prompts, those before
    every trained turn, so that no prompt is in both splits: conversations that begin alike go to the same one."""
    shuffle: bool = True
    """Shuffle the rows, by the recipe's seed and anew in each epoch of a training on them. `false`: rows stay in the order of
    their sources, and training takes them in it, as for a curriculum."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"sources": [value]}
        if isinstance(value, (list, tuple)):
            return {"sources": value}
        if isinstance(value, dict) and origins().keys() & value.keys():
            if "sources" in value:
                raise ValueError("give either `sources` or the fields of a single source")
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
    def _sources_fit(self, info: ValidationInfo) -> DataConfig:
        given = [source.weight is not None for source in self.sources if not source.held_out]
        if any(given) and not all(given):
            raise ValueError("give `weight` for every source or for none")
        if not any(given):
            self.refuse_unused(info, ("mixing",), "without a `weight` of each source: every row is used once")
        held_out = [source for source in self.sources if source.held_out]
        if not self.completion_only_loss and self.assistant_turns == "last":
            raise ValueError(
                "`completion_only_loss: false` trains on everything before the last turn, and `assistant_turns: last` on "
                "nothing before it: remove one of them"
            )
        if held_out and self.test_rows:
            raise ValueError("`test_rows` and a source with `held_out` are two test sets: remove one of them")
        if len(held_out) == len(self.sources):
            raise ValueError("`sources`: all are `held_out`, so there is nothing to train on")
        if any(source.weight is not None for source in held_out):
            raise ValueError("`weight`: a source with `held_out` is not part of the mixture: remove its weight")
        return self

    @property
    def has_test_rows(self) -> bool:
        """Whether rows are held out to measure on."""
        return bool(self.test_rows) or any(source.held_out for source in self.sources)

    def refuse_test_rows(self, info: ValidationInfo, field: str) -> None:
        """Raise ValueError if the data, at ``field``, is only measured on and yet holds rows out, which nothing would use.
        Stored recipes pass."""
        if self.has_test_rows and refuses_unused(info.context):
            raise ValueError(
                f"`{field}`: all of these rows are measured, and none are trained on: remove `test_rows`, and `held_out` of "
                "sources, which would leave rows out"
            )
