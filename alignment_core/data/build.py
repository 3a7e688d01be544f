"""A data set from its recipe: read, parse, render, filter, hold out, mix, and write as Parquet."""

from __future__ import annotations

import functools
import json
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.canonical import digest_of
from alignment_core.data import formats, hold_out, kinds, mixing, overlap, statistics, tables
from alignment_core.data.conditions import compared, conditioned
from alignment_core.data.context import check_context, check_embedded
from alignment_core.data.fields import Fields
from alignment_core.data.hold_out import RowMeta
from alignment_core.data.image_reader import ImageReader
from alignment_core.data.image_tokens import Processor, tokens_of_images
from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.images import FOLDER as IMAGES_FOLDER
from alignment_core.data.images import keep_images, with_image_column
from alignment_core.data.kinds import KEPT, DroppedRow, Example, Kind
from alignment_core.data.limits import SHORTENED, Limits
from alignment_core.data.message_fields import CONTEXT
from alignment_core.data.origins import origin_of
from alignment_core.data.pin import PinnedSource
from alignment_core.data.row_order import as_stored
from alignment_core.data.template import TODAY, Renderer
from alignment_core.disk_list import DiskList
from alignment_core.errors import DataError, UserError
from alignment_core.recipes.sections.data import DataConfig

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase

OnProgress = Callable[[int, int | None], None]
PROGRESS_EVERY = 200


@dataclass(frozen=True)
class BuiltDataset:
    """Two tables with the columns of their kind of rows, and the statistics of their preparation."""

    kind: Kind
    rows: DiskList[dict[str, Any]]
    """Every row that passed the filters."""
    numbers: Mapping[str, Sequence[int]]
    """Numbers of the ``rows`` in the tables ``train`` and ``test``."""
    statistics: dict[str, Any]
    prompts: frozenset[str]
    """Digests of the prompts of the training table, see :mod:`alignment_core.data.overlap`."""
    shuffled: bool = True
    """Whether training shuffles the rows, see :mod:`alignment_core.data.row_order`."""
    images: Path | None = None
    """The folder with the images of the rows; None if no row has one."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The columns of both tables and their types."""
        return with_image_column(self.kind.columns, self.images is not None)

    def of(self, table: str) -> Iterator[dict[str, Any]]:
        """The rows of a table, one at a time."""
        rows = self.rows.chosen(self.numbers[table])
        return ({IMAGES: (), **row} for row in rows) if self.images else rows

    @property
    def train(self) -> pyarrow.Table:
        return tables.to_table(self.of("train"), self.columns)

    @property
    def test(self) -> pyarrow.Table:
        return tables.to_table(self.of("test"), self.columns)


def build(
    config: DataConfig,
    pinned: Sequence[PinnedSource],
    tokenizer: PreTrainedTokenizerBase,
    kind_name: str,
    seed: int,
    on_progress: OnProgress | None = None,
    context: int | None = None,
    settings: Mapping[str, Any] | None = None,
    scratch: Path | None = None,
    embeddings: int | None = None,
    processor: Processor | None = None,
) -> BuiltDataset:
    """Build the data set of ``config`` from its pinned sources, of the kind of rows with this name. Equal arguments give
    equal tables.

    ``on_progress`` is called with (rows read, total rows if known). ``context`` is the model's context length in tokens;
    ``embeddings`` the number of tokens that it has embeddings for; ``processor`` that of its images, None for a model of text;
    ``settings`` are those of the kind of rows. Rows need not
    fit into memory: they are in a file in ``scratch`` (None: the folder for temporary files), with about a kilobyte per row
    in memory. Raises UserError for settings that cannot work with this tokenizer and for tokens without embeddings,
    DataError for rows that cannot be used; both before any training begins.
    """
    kind = kinds.load(kind_name)
    ledger = statistics.Ledger(pinned, config.max_bad_rows, kind)
    reader = ImageReader(images_folder(scratch)) if processor and kind.takes_images else None
    renderer = Renderer(
        tokenizer, config.chat_template, images=tokens_of_images(processor, reader.folder if reader else None)
    )
    limits = Limits(config, renderer, tokenizer.bos_token_id, settings or {})
    rows, kept = DiskList[dict[str, Any]](scratch), []
    for row, columns in kept_rows(pinned, limits, ledger, kind, seed, on_progress, scratch, reader):
        check_embedded(columns, embeddings, tokenizer.convert_ids_to_tokens)
        rows.append(columns)
        kept.append(row)
    ledger.check_bad_rows()
    ledger.unread += limits.renderer.fields.unread
    mixed = any(source.source.weight is not None for source in pinned)
    weights = [source.source.weight or 0.0 for source in pinned] if mixed else []
    ledger.check_rows_left(hold_out.counts(kept, len(pinned)), mixture=bool(weights))

    held_out = {number for number, source in enumerate(pinned) if source.source.held_out}
    if held_out:
        pool, test = hold_out.held_out_sources(kept, held_out, ledger)
    else:
        pool, test = hold_out.hold_out(kept, config.test_rows, ledger, kind.together)
    by_source: list[list[RowMeta]] = [[row for row in pool if row.source == number] for number in range(len(pinned))]
    left = [len(rows) or int(number in held_out) for number, rows in enumerate(by_source)]
    ledger.check_rows_left(left if any(map(len, by_source)) else [0] * len(pinned), mixture=bool(weights))
    order = mixing.order([len(rows) for rows in by_source], weights or None, config.mixing, config.shuffle, seed)
    train = [by_source[source][row] for source, row in order]
    per_source = [hold_out.counts(rows, len(pinned)) for rows in (kept, train, test)]
    used = Counter(source for source, _ in set(order))
    per_source.append([len(rows) - used[source] for source, rows in enumerate(by_source)])
    numbers = {"train": array("q", (row.number for row in train)), "test": array("q", (row.number for row in test))}
    for table in numbers.values():
        lengths = [kept[number].sequences for number in table]
        check_context(lengths, context, partial(_source, rows, table))
    tokens = statistics.lengths(row.sequences for row in train)
    images = statistics.images(rows[number].get(IMAGES, ()) for table in numbers.values() for number in table)
    return BuiltDataset(
        kind,
        rows,
        numbers,
        {
            "kind": kind_name,
            **({"today": f"{TODAY:%Y-%m-%d}"} if renderer.asks_for_today else {}),
            **ledger.summary(*per_source),
            "tokens": tokens,
            **({"images": images} if images else {}),
        },
        frozenset(prompt for row in train for prompt in row.prompts),
        config.shuffle,
        reader.folder if reader and images else None,
    )


def images_folder(scratch: Path | None) -> Path:
    """The folder for images while rows are read: below ``scratch``, or else a temporary one until the process ends."""
    return scratch / IMAGES_FOLDER if scratch else Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="align-images-")


def _source(rows: DiskList[dict[str, Any]], table: Sequence[int], place: int) -> str:
    """File and line of a row of a table."""
    return str(rows[table[place]]["source"])


def write(built: BuiltDataset, directory: Path) -> None:
    """Write train.parquet, test.parquet (if it has rows), statistics.json, the digests of the training prompts and the images:
    the same bytes for the same data."""
    import pyarrow.parquet as pq

    directory.mkdir(parents=True, exist_ok=True)
    for name, numbers in built.numbers.items():
        if not len(numbers):
            continue
        layout = tables.schema(built.columns)
        if not built.shuffled:
            layout = as_stored(layout)
        with pq.ParquetWriter(directory / f"{name}.parquet", layout, compression="zstd") as file:
            for block in tables.blocks(built.of(name), layout):
                file.write_batch(block)
    text = json.dumps(built.statistics, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / "statistics.json").write_text(text + "\n", encoding="utf-8")
    overlap.write_prompts(built.prompts, directory)
    if built.images:
        digests = {digest for name in built.numbers for row in built.of(name) for digest in row[IMAGES]}
        keep_images(digests, built.images, directory / IMAGES_FOLDER)


def kept_rows(
    pinned: Sequence[PinnedSource],
    limits: Limits,
    ledger: statistics.Ledger,
    kind: Kind,
    seed: int,
    on_progress: OnProgress | None,
    scratch: Path | None = None,
    reader: ImageReader | None = None,
) -> Iterator[tuple[RowMeta, dict[str, Any]]]:
    """Rows of the table from all sources, with their columns; dropped rows are counted in the ``ledger``."""
    if not limits.config.completion_only_loss and not kind.trains_prompts:
        raise UserError(f"completion_only_loss: has no effect on {kind.gives}: leave it out")
    total = _expected_rows(pinned)
    number_of_row = 0
    for number, source in enumerate(pinned):
        names_tasks = origin_of(source.source).names_tasks
        read_rows = examples(source, number, ledger, kind, seed, limits.config.prompt_template, scratch, reader)
        for example_number, (where, example, shown, kept) in enumerate(read_rows):
            read = ledger.read.total()
            if on_progress and read % PROGRESS_EVERY == 0:
                on_progress(read, total)
            try:
                digest, prompts, context = _digests(example, kept, limits.config.assistant_turns == "last")
                rendered = [limits.finished(row) for row in shown.rows(limits)]
            except (ValueError, RecursionError) as error:
                ledger.bad(number, where, str(error))
                continue
            ledger.split[number] += len(rendered) > 1
            # A user's column that happens to be called `task` does not name a built-in task.
            made_by = {"source": where, KEPT: kept} if names_tasks else {"source": where, KEPT: kept, "task": None}
            for columns in rendered:
                if isinstance(columns, str):
                    ledger.dropped[number][columns] += 1
                else:
                    ledger.shortened[number] += SHORTENED in columns
                    types = with_image_column(kind.columns, IMAGES in columns)
                    columns = tables.compact({**columns, **made_by}, types)
                    sequences = kind.sequences(columns)
                    yield RowMeta(number_of_row, number, example_number, digest, prompts, context, sequences), columns
                    number_of_row += 1
    if on_progress:
        on_progress(ledger.read.total(), total)


def examples(
    pinned: PinnedSource,
    number: int,
    ledger: statistics.Ledger,
    kind: Kind,
    seed: int,
    template: str | None = None,
    scratch: Path | None = None,
    reader: ImageReader | None = None,
) -> Iterator[tuple[str, Example, Example, str | None]]:
    """The well-formed rows of a source: its place, the example by which it is told apart, the example with its prompt in the
    ``template``, and its ``keep_columns`` as JSON text. The first row decides the format. ``reader`` reads the images of rows;
    None for a model of text."""
    source, format = pinned.source, None
    folders = functools.cache(lambda: origin_of(source).folders(pinned))

    def folder(where: str) -> str | None:
        return folders().get(where.rpartition(":")[0])

    try:
        formats.check_format(source.format, kind)
        if source.keep_columns and KEPT not in kind.columns:
            raise UserError(f"keep_columns: {kind.gives} cannot keep further columns; only prompts can")
    except UserError as error:
        raise UserError(f"{pinned.name}: {error}") from None
    for where, row in pinned.read(number, seed, kind, scratch):
        ledger.read[number] += 1
        if isinstance(row, str):
            ledger.bad(number, where, row)
            continue
        if format is None:
            try:
                format = formats.detect(row, source.format, source.columns, kind)
            except UserError as error:
                raise DataError(f"{where}: {error}") from None
        try:
            images = reader.of_row(partial(folder, where)) if reader and kind.takes_images else None
            fields = Fields(row, source.columns, images)
            example = kind.formats[format].parse(fields)
            fields.check_images()
            shown = conditioned(example, template, fields) if template else example
            kept = fields.kept(source.keep_columns)
            ledger.unread.update(f"rows have `{name}`, which nothing reads" for name in fields.unread(CONTEXT))
            yield where, compared(example, template, fields), shown, kept
        except DroppedRow as error:
            ledger.dropped[number][error.reason] += 1
        except (ValueError, RecursionError) as error:
            ledger.bad(number, where, str(error))


def _digests(example: Example, kept: str | None, last_turn: bool) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Digests of the example with its kept columns, of the prompts with trained answers, and of prompts in its context."""
    content = list(vars(example).values())
    try:
        return digest_of([*content, kept] if kept else content), *hold_out.prompts_of(example, last_turn)
    except TypeError as error:
        raise ValueError(f"a message contains a value that JSON cannot represent: {error}") from None


def _expected_rows(pinned: Sequence[PinnedSource]) -> int | None:
    """Total number of rows, if it is known without reading."""
    counts = [origin_of(source.source).expected(source.source) for source in pinned]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
