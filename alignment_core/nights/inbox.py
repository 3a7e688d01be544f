"""The inbox: preference rows that keep arriving, each identified by the digest of its content, not by file or time."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.canonical import digest_of, digest_of_file
from alignment_core.data import formats
from alignment_core.data.fields import Fields
from alignment_core.data.files import NumberedRow, read_file
from alignment_core.data.image_reader import ImageDigests, ImageReader
from alignment_core.data.images import images_in_messages
from alignment_core.data.kinds.preferences import KIND
from alignment_core.data.pinned_images import names_images
from alignment_core.errors import DataError, UserError
from alignment_core.recipes import DataSource
from alignment_core.recipes.paths import COMPRESSIONS, ROW_SUFFIXES, TEXT_SUFFIX, fixed_part, is_address, row_suffix

STORE = "store:"
NO_FILES = "no files found"
DATA_SET = "dataset"
"""Kind of the artifacts whose prompts are rendered already, and which hold test rows beside those for training."""


@dataclass(frozen=True)
class InboxRow:
    """One pair, in the columns that a data set of preferences has."""

    digest: str
    """SHA-256 of the canonical JSON of the row as it was read, with the digests of its images if it has any."""
    where: str
    """File and line."""
    pair: dict[str, Any]
    images: tuple[str, ...] = ()
    """Digests of its images."""


@dataclass
class Inbox:
    """New rows, in the order of sources, file names and lines."""

    rows: list[InboxRow] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    """Rows and files that cannot be read, as ``file:line: reason``. They stay; once repaired, they are new rows."""
    files: dict[str, str | None] = field(default_factory=dict, compare=False)
    """SHA-256 of the files as they were just before they were read, by name; none if several have this name."""
    looked: list[str] = field(default_factory=list, compare=False)
    """One sentence for each source: its path, files and rows. Another one names data sets that were left out."""


class NamedImages(ImageDigests):
    """The images that rows name, before they are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.at_addresses: set[str] = set()
        """Digests that were made of addresses themselves, which say nothing of the contents."""

    def _content(self, place: str, image: str) -> bytes:
        content = super()._content(place, image)
        if is_address(place):
            self.at_addresses.add(self._kept(content))
        return content


def read_inbox(
    sources: Iterable[DataSource], seen: Set[str], store: Store, images: Callable[[], ImageReader | None] = lambda: None
) -> Inbox:
    """Read every row of the sources whose digest is not among ``seen``, each once however often it is there.

    A last line that is not finished is left for the next time. ``images`` gives the reader that keeps the images of new rows,
    None where the model reads text alone; it is called for rows that have some. A row whose image is missing or broken is
    malformed. Raises UserError for a source that does not exist, and the errors of ``images``.
    """
    inbox, known, digests = Inbox(), set(seen), NamedImages()
    for source in sources:
        formats.check_columns(source.columns)
        formats.check_format(source.format, KIND)
        data_sets = list[str]()
        files = _files(str(source.path), store, data_sets)
        lines = 0
        before = len(inbox.rows)
        unfinished = list[str]()
        for name, path in files:
            digest = _digest(path)
            inbox.files[name] = digest if inbox.files.get(name, digest) == digest else None
            for number, content in _rows(name, path, inbox.malformed, unfinished):
                lines += 1
                where = f"{name}:{number}"
                # Outside of the try: that the model cannot be inspected now is no fault of a row.
                reader = images() if _has_images(content, source.columns) else None
                try:
                    row = _read(content, where, source, known, path.parent, digests, reader)
                except (ValueError, RecursionError, UserError) as error:
                    inbox.malformed.append(f"{where}: {error}")
                    continue
                if row is not None:
                    known.add(row.digest)
                    inbox.rows.append(row)
        inbox.looked.append(_account(str(source.path), len(files), lines, len(inbox.rows) - before, unfinished))
        if data_sets:
            inbox.looked.append(
                f"{source.path}: {', '.join(data_sets)} not read: data sets are rendered with a chat template already; publish "
                "rows as they were before, as another kind of artifact"
            )
    return inbox


def _digest(path: Path) -> str | None:
    try:
        return digest_of_file(path)
    except OSError:  # reported when the file is read
        return None


def _account(given: str, files: int, rows: int, new: int, unfinished: list[str]) -> str:
    """``/data/inbox/*.jsonl: 2 files, 30 rows, 4 new``."""
    path = given if given.startswith(STORE) else str(Path(given).expanduser().absolute())
    if not files:
        return f"{path}: {NO_FILES}"
    count = f"{files} file{'' if files == 1 else 's'}, {rows} row{'' if rows == 1 else 's'}, {new} new"
    waits = f"; {', '.join(unfinished)}: the last line counts once it ends with a newline" if unfinished else ""
    return f"{path}: {count}{waits}"


def _read(
    content: dict[str, Any] | str,
    where: str,
    source: DataSource,
    known: Set[str],
    folder: Path,
    digests: NamedImages,
    reader: ImageReader | None,
) -> InboxRow | None:
    """The row, or None if it is known. Raises ValueError or UserError with the problem of a malformed one."""
    if isinstance(content, str):
        raise ValueError(content)
    digest = digest_of(json.loads(json.dumps(content, default=str)))  # Parquet holds times and the like, too
    named: tuple[str, ...] = ()
    if reader is not None:  # equal names may stand for other images in other folders
        named = _images_of(_parsed(content, source, digests, folder))
        digest = digest_of([digest, named])
    if digest in known:
        return None
    pair = _parsed(content, source, reader, folder)
    kept = _images_of(pair)
    # The next reading would find another digest, and the row would be taken once more.
    if any(before != now and before not in digests.at_addresses for before, now in zip(named, kept, strict=True)):
        raise ValueError("`images`: a file changed while the inbox was read; the next night reads it again")
    return InboxRow(digest, where, pair, kept)


def _has_images(content: dict[str, Any] | str, columns: Mapping[str, str]) -> bool:
    """Whether a row names an image; False for one that is nested too deeply, which is malformed."""
    with suppress(RecursionError):
        return not isinstance(content, str) and names_images(content, columns)
    return False


def _parsed(content: dict[str, Any], source: DataSource, reader: ImageReader | None, folder: Path) -> dict[str, Any]:
    """The columns of a row; those of its images by a ``reader`` of paths that begin at ``folder``."""
    format = formats.detect(content, source.format, source.columns, KIND)
    of_store = str(source.path).startswith(STORE)  # published by others, who choose no files of this machine
    read = reader.of_row(lambda: str(folder), only_below=of_store) if reader else None
    fields = Fields(content, source.columns, read)
    pair = vars(KIND.formats[format].parse(fields))
    fields.check_images()
    return {name: value for name, value in pair.items() if value is not None}


def _images_of(pair: dict[str, Any]) -> tuple[str, ...]:
    return images_in_messages(pair["prompt"])


def _rows(name: str, path: Path, malformed: list[str], unfinished: list[str]) -> Iterator[NumberedRow]:
    """The rows of a file, without a last line that may still be written; then the file is ``unfinished``.

    A JSON object ends with its bracket. A row of CSV that is cut short may look whole: only its newline says that it is.
    """
    if not _has_rows(path):
        malformed.append(f"{name}: rows are read from {', '.join(ROW_SUFFIXES)} files")
        return
    last: NumberedRow | None = None
    end = _end(path)
    try:
        for row in read_file(path):
            if last is not None:
                yield last
            last = row
    except DataError as error:
        malformed.append(name + str(error).removeprefix(str(path)))
    except OSError as error:
        malformed.append(f"{name}: cannot be read: {error.strerror}")
    if last is None:
        return
    suffix, packed = row_suffix(path.name), path.suffix.lower() in COMPRESSIONS  # which ends with a check of its own
    in_doubt = suffix == ".csv" or (suffix in (".jsonl", ".ndjson", ".json") and isinstance(last[1], str))
    if in_doubt and not packed and (end[1] != b"\n" or end != _end(path)):  # it may have grown while it was read
        unfinished.append(name)
    else:
        yield last


def _has_rows(path: Path) -> bool:
    return row_suffix(path.name) not in (None, TEXT_SUFFIX)


def _end(path: Path) -> tuple[int, bytes]:
    """Size and last byte of a file; nothing of one that cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return size, file.read(1)
    except OSError:
        return 0, b""


def _files(given: str, store: Store, data_sets: list[str]) -> list[tuple[str, Path]]:
    """(name to show, file), in an order that does not depend on the file system; ``data_sets`` gets those left out."""
    if given.startswith(STORE):
        return _files_of_store(given.removeprefix(STORE), store, data_sets)
    path = Path(given).expanduser()
    if path.is_dir():
        return [(file.name, file) for file in sorted(path.glob("[!.]*")) if _has_rows(file) and file.is_file()]
    if path.is_file():
        return [(path.name, path)]
    folder, pattern = fixed_part(path)
    if not glob.has_magic(pattern):
        raise UserError(
            f"dpo.data: {given}: there is no such file or folder; a glob such as {given.rstrip('/')}/*.jsonl may match none"
        )
    names = sorted(glob.glob(pattern, root_dir=folder, recursive=True))
    return [(Path(name).as_posix(), folder / name) for name in names if (folder / name).is_file()]


def _files_of_store(prefix: str, store: Store, data_sets: list[str]) -> list[tuple[str, Path]]:
    """The files of every artifact that a tag with this prefix names or has named, but for ``data_sets``."""
    names = [name for name in sorted(store.tags.all()) if name.startswith(prefix)]
    references = dict.fromkeys(move.to for name in names for move in store.tags.history(name))
    data_sets += [reference.short for reference in references if reference.kind == DATA_SET]
    folders = {reference.short: store.fetch(reference) for reference in references if reference.kind != DATA_SET}
    return [
        (f"{short}/{file.relative_to(folder).as_posix()}", file)
        for short, folder in folders.items()
        for file in sorted(folder.rglob("*"))
        if _has_rows(file) and file.is_file()
    ]
