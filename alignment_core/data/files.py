"""Rows of JSONL, JSON, CSV, Parquet and Arrow files, one at a time, each with its number; a text file is one row.

Text formats may be compressed (.gz, .bz2, .xz, .zst).
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from alignment_core.data.addresses import RemoteFile
from alignment_core.data.fields import ArrowRow
from alignment_core.errors import DataError, first_line
from alignment_core.recipes.paths import COMPRESSIONS, row_suffix

LONGEST_LINE = 64 * 2**20
"""Bytes of the longest line that is read; a longer one is a broken file, not a row."""


RowsFile = Path | RemoteFile
NumberedRow = tuple[int, dict[str, Any] | str]
"""Line or row number, from 1, and the row, or the reason why it is malformed."""


def read_file(path: RowsFile) -> Iterator[NumberedRow]:
    """The rows of one file, of a suffix in ``recipes.paths.ROW_SUFFIXES`` or ``TEXT_SUFFIX``.

    Raises DataError if it cannot be read at all.
    """
    reader = _READERS[str(row_suffix(path.name))]
    return _unpacked(path, reader) if path.suffix.lower() in COMPRESSIONS else reader(path)


def _unpacked(path: RowsFile, reader: Callable[[RowsFile], Iterator[NumberedRow]]) -> Iterator[NumberedRow]:
    """The rows that a ``reader`` gives of a compressed file."""
    path.open("rb").close()  # a missing or forbidden file has an error of its own, not that of a broken one
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: is not a readable {path.suffix.lower()} file: {first_line(error)}") from None


def open_unpacked(path: RowsFile) -> BinaryIO:
    """The bytes of a file, unpacked."""
    packed = path.suffix.lower()
    if packed == ".zst":
        import pyarrow as pa

        source = str(path) if isinstance(path, Path) else path.open("rb")
        return io.BufferedReader(pa.input_stream(source, compression="zstd"))
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    if packed not in openers:
        return path.open("rb")
    opened: BinaryIO = openers[packed](path if isinstance(path, Path) else path.open("rb"), "rb")
    return opened


def _jsonl(path: RowsFile) -> Iterator[NumberedRow]:
    with open_unpacked(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")  # a byte-order mark is no part of the first row
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                _skip_line(file)
                yield number, f"is longer than {LONGEST_LINE} bytes"
            elif line.strip():
                yield number, _json_row(line)


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
        pass


def _json_row(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        return _not_utf8(line, error)
    except json.JSONDecodeError as error:
        return f"is not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        return f"is not usable JSON: {error}"
    return value if isinstance(value, dict) else _not_an_object(value)


def _not_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    return f"is not valid UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}"


def _not_an_object(value: Any) -> str:
    kinds = {list: "a list", str: "a text", type(None): "null"}
    return f'is {kinds.get(type(value), json.dumps(value))}; a row is an object such as {{"prompt": …}}'


def _json(path: RowsFile) -> Iterator[NumberedRow]:
    """A list of objects, or JSON lines under the name .json, as many data sets have it."""
    with open_unpacked(path) as file:
        if not file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _jsonl(path)
            return
    try:
        with open_unpacked(path) as file:
            rows = json.loads(file.read().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}:{error.colno}: is not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not usable JSON: {error}") from None
    for number, row in enumerate(rows, start=1):
        yield number, row if isinstance(row, dict) else _not_an_object(row)


def _csv(path: RowsFile) -> Iterator[NumberedRow]:
    csv.field_size_limit(LONGEST_LINE)  # the module's own limit of 128 KiB is shorter than many documents
    # Invalid UTF-8 becomes unpaired surrogates, which the parser of the row then refuses by column.
    with io.TextIOWrapper(open_unpacked(path), encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, strict=True)
        try:
            header = next(lines, [])
        except csv.Error as error:
            raise DataError(f"{path}:1: is not valid CSV: {error}") from None
        if len(set(header)) < len(header):
            raise DataError(f"{path}:1: the header names a column twice: {', '.join(header)}")
        while True:
            number = lines.line_num + 1
            try:
                fields = next(lines)
            except StopIteration:
                return
            except csv.Error as error:
                yield number, f"is not valid CSV: {error}"
                continue
            if len(fields) == len(header):
                yield number, dict(zip(header, fields, strict=True))
            elif fields:
                yield number, f"has {len(fields)} fields, the header has {len(header)}"


def _parquet(path: RowsFile) -> Iterator[NumberedRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = path if isinstance(path, Path) else path.open("rb")
        with pq.ParquetFile(source, pre_buffer=False) as file:  # else the whole file is in memory until its last row
            yield from _batches(file.iter_batches(batch_size=1024))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # text columns may hold any bytes
        raise DataError(f"{path}: is not a readable Parquet file: {first_line(error)}") from None


def _arrow(path: RowsFile) -> Iterator[NumberedRow]:
    """An Arrow stream, which is what ``datasets`` writes, or an Arrow file."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) if isinstance(path, Path) else path.open("rb") as file:
            try:
                batches: Iterable[Any] = pa.ipc.open_stream(file)
            except pa.ArrowInvalid:
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            yield from _batches(batches)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # text columns may hold any bytes
        raise DataError(f"{path}: is not a readable Arrow file: {first_line(error)}") from None


def _txt(path: RowsFile) -> Iterator[NumberedRow]:
    """One row ``{"text": …}``, the whole file."""
    with open_unpacked(path) as file:
        content = file.read(LONGEST_LINE + 1)
    if len(content) > LONGEST_LINE:
        yield 1, f"is longer than {LONGEST_LINE} bytes: split the file"
        return
    try:
        yield 1, {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        start = content.rfind(b"\n", 0, error.start) + 1
        error.start -= start
        yield content.count(b"\n", 0, start) + 1, _not_utf8(content[start:], error)


def _batches(batches: Iterable[Any]) -> Iterator[NumberedRow]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, ArrowRow(row)


_READERS: dict[str, Callable[[RowsFile], Iterator[NumberedRow]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _txt,
}
