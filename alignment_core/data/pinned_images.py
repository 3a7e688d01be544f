"""The images that rows of local files name by paths: their content is part of the content digest of the source."""

from __future__ import annotations

import functools
import json
import re
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.artifacts.os_errors import explained
from alignment_core.canonical import digest_of, digest_of_file
from alignment_core.data.fields import lookup
from alignment_core.data.files import open_unpacked, read_file
from alignment_core.data.image_reader import NO_FILE
from alignment_core.data.images import digest_in
from alignment_core.data.kinds import roles
from alignment_core.data.message_fields import IMAGE_FIELDS, IMAGE_PARTS
from alignment_core.errors import AlignmentError
from alignment_core.recipes.paths import is_address, row_suffix

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("images", "image")
"""Columns of a row's own images, where the recipe names none."""
OTHER_COLUMNS = ("conversations",)
"""Columns of messages, beside those that have the names of roles."""
_IN_PARTS = rb'"(images?|image_url)"\s*:|"type"\s*:\s*"(image|input_image)'
_OF_PARTS = ("type", *IMAGE_FIELDS)
"""Fields of the parts of messages that say whether there is an image, and which."""
_HAS_IMAGE_FIELD = re.compile(rf"\b({'|'.join(IMAGE_FIELDS)}): ")
"""In the type of an Arrow column."""
_CHUNK, _OVERLAP = 1 << 20, 64
_CACHED = 1 << 18
"""Digests of images that stay in memory."""


def digest_of_images(files: Sequence[Path], columns: Mapping[str, str]) -> str | None:
    """A digest of the names in rows and the contents of all images of the ``files``; None if no row names a path.

    ``columns`` are those of the recipe by role. Images that are missing or forbidden count as missing. Raises EnvironmentFault,
    Unavailable or StoreError for one that this machine fails to read.
    """
    read = _Columns(columns)
    named = {(path, str(file.parent)) for file in files for path in _paths(file, read)}
    contents = [[path, _digest(Path(folder, path))] for path, folder in sorted(named)]
    return digest_of(contents) if contents else None


def columns_of_images(columns: Mapping[str, str]) -> tuple[str, ...]:
    """The columns of a row's own images; ``columns`` are those of the recipe by role."""
    named = columns.get("images", COLUMNS[0])
    return COLUMNS if named == COLUMNS[0] else (named,)


def may_have_messages(name: str, columns: Mapping[str, str]) -> bool:
    """Whether the column ``name`` may have messages with images; ``columns`` are those of the recipe by role."""
    return _is_in(name, _Columns(columns).texts)


def names_images(row: Mapping[str, Any], columns: Mapping[str, str]) -> bool:
    """Whether a row has an image: a path, an address, or bytes. ``columns`` are those of the recipe by role."""
    return any(isinstance(image, str | bytes | Mapping) and image for image in _Columns(columns).of_row(row))


def _digest(path: Path) -> str | None:
    try:
        status = path.stat()
        regular = stat.S_ISREG(status.st_mode)
        return _cached_digest(path, status.st_mtime_ns, status.st_size, status.st_ino) if regular else None
    except ValueError:  # a path with a null character
        return None
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        with explained("read", path):
            raise


@functools.lru_cache(_CACHED)
def _cached_digest(path: Path, changed: int, size: int, inode: int) -> str:
    return digest_of_file(path)


class _Columns:
    """The columns in which rows name images: those of images, and those of texts, which may be messages with images."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.images = columns_of_images(columns)
        by_role = [columns.get(role, role) for role in roles()]
        self.texts = [column for column in (*by_role, *OTHER_COLUMNS) if column not in self.images]

    def of_row(self, row: Mapping[str, Any]) -> Iterator[Any]:
        """What stands where a row may name images."""
        for column in self.images:
            value = lookup(row, column)
            yield from value if isinstance(value, list) else [value]
        for column in self.texts:
            yield from _in_parts(lookup(row, column))

    def paths(self, row: Mapping[str, Any]) -> Iterator[str]:
        """The paths of the images of a row."""
        for image in self.of_row(row):
            yield from _path_of(image)


def _is_in(name: str, columns: Iterable[str]) -> bool:
    """Whether the column ``name`` of a file is one of the ``columns`` of a recipe or contains it, as ``meta`` contains
    ``meta.picture``."""
    return any(column == name or column.startswith(f"{name}.") for column in columns)


def _path_of(image: Any) -> Iterator[str]:
    """The path that an image of a row has; nothing if it has bytes, an address or a digest."""
    path = image.get("path") if isinstance(image, Mapping) and image.get("bytes") is None else image
    if isinstance(path, str) and path and not (path.startswith("data:") or is_address(path) or digest_in(path)):
        yield path


def _in_parts(value: Any) -> Iterator[Any]:
    """The images in parts of messages, at any depth."""
    if isinstance(value, list):
        for item in value:
            yield from _in_parts(item)
    elif isinstance(value, Mapping):
        kind = value.get("type")
        for field in IMAGE_FIELDS if kind in IMAGE_PARTS else ("image", "image_url") if kind is None else ():
            image = value.get(field)
            yield image.get("url") if isinstance(image, Mapping) and "url" in image else image
        for item in value.values():
            if isinstance(item, list | Mapping):
                yield from _in_parts(item)


def _paths(file: Path, columns: _Columns) -> Iterator[str]:
    """The paths that rows of a file name, up to where it cannot be read: reading the rows says why."""
    from pyarrow import ArrowException

    readers = {".parquet": _of_parquet, ".arrow": _of_arrow}
    try:
        for row in readers.get(str(row_suffix(file.name)), _of_text)(file, columns):
            yield from columns.paths(row)
    except (AlignmentError, ArrowException, OSError, EOFError, ValueError, RecursionError):
        return


def _of_text(file: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    """The rows of a file of a text format; none if it has no field of images, which is found without parsing them."""
    if _may_name_images(file, columns):
        yield from (row for _, row in read_file(file) if isinstance(row, dict))


def _may_name_images(file: Path, columns: _Columns) -> bool:
    suffix = row_suffix(file.name)
    if suffix == ".txt":
        return False
    if suffix == ".csv":
        first = next((row for _, row in read_file(file) if isinstance(row, dict)), {})
        return any(_is_in(name, columns.images) for name in first)
    needles = [needle for column in columns.images for needle in _needles(column)]
    names_images = re.compile(b"|".join([_IN_PARTS, *map(re.escape, needles)]))
    overlap = max(_OVERLAP, *map(len, needles))
    with open_unpacked(file) as content:
        before = b""
        while chunk := content.read(_CHUNK):
            window = before + chunk
            if names_images.search(window):
                return True
            before = window[-overlap:]
    return False


def _needles(column: str) -> Iterator[bytes]:
    """The beginnings, in JSON, of the name of a column or of the column that contains it."""
    for ensure_ascii in (True, False):
        yield json.dumps(column.partition(".")[0], ensure_ascii=ensure_ascii)[:-1].encode()


def _of_parquet(file: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file with the texts alone that may name images."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file, pre_buffer=False) as content:
        names = _names(content.schema_arrow, columns)
        leaves = [content.schema.column(number) for number in range(len(content.schema))]
        embedded = {
            leaf.path.removesuffix("bytes") + "path"
            for number, leaf in enumerate(leaves)
            if leaf.name == "bytes" and _has_no_nulls(content.metadata, number)
        }
        texts = [
            leaf.path
            for leaf in leaves
            if leaf.logical_type.type == "STRING" and leaf.path not in embedded
            for name in names
            if leaf.path == name
            or (leaf.path.startswith(f"{name}.") and (names[name] is None or leaf.name in _OF_PARTS))
        ]
        for batch in content.iter_batches(batch_size=1024, columns=texts) if texts else ():
            yield from batch.to_pylist()


def _has_no_nulls(metadata: Any, column: int) -> bool:
    """Whether a column of a Parquet file has a value in every row, by its statistics."""
    groups = [metadata.row_group(number).column(column).statistics for number in range(metadata.num_row_groups)]
    return all(group is not None and group.has_null_count and group.null_count == 0 for group in groups)


def _of_arrow(file: Path, columns: _Columns) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow stream or file with the texts alone that may name images."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as content:
        try:
            batches: Iterable[pa.RecordBatch] = pa.ipc.open_stream(content)
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(content)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            names = _names(batch.schema, columns)
            arrays = {name: _texts(batch.column(name), fields) for name, fields in names.items()}
            texts = {name: array for name, array in arrays.items() if array is not None}
            if texts:
                yield from pa.RecordBatch.from_pydict(texts).to_pylist()


def _names(schema: pa.Schema, columns: _Columns) -> dict[str, Container[str] | None]:
    """The columns of a file that may name images, each with the fields of structs that say so; None for all fields."""
    names: dict[str, Container[str] | None] = {}
    for field in schema:
        if _is_in(field.name, columns.images):
            names[field.name] = None
        elif _is_in(field.name, columns.texts) and _HAS_IMAGE_FIELD.search(str(field.type)):
            names[field.name] = _OF_PARTS
    return names


def _texts(array: pa.Array, fields: Container[str] | None) -> pa.Array | None:
    """The texts at any depth of an array, but for those of structs in other ``fields`` than these; a null for the path of an
    image beside its bytes, which are not read. None if there are none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        values = _texts(array.values, fields)
        return None if values is None else type(array).from_arrays(array.offsets, values)
    if not pa.types.is_struct(kind):
        return array if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None
    texts = {}
    for number, field in enumerate(kind):
        inner = _texts(array.field(number), fields)
        is_text = not (pa.types.is_nested(field.type))
        if inner is not None and (not is_text or fields is None or field.name in fields):
            texts[field.name] = inner
    if "path" in texts and (place := kind.get_field_index("bytes")) >= 0:
        texts["path"] = pc.if_else(pc.is_null(array.field(place)), texts["path"], None)
    return pa.StructArray.from_arrays(list(texts.values()), list(texts)) if texts else None
