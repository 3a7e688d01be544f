"""Relative paths of a recipe are relative to its own file; those given on the command line, to the working folder.

A field holds a path if it has one of the types below. A text that may also be a name remains one unless a file or folder of
this name exists.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator

ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
TEXT_SUFFIX = ".txt"
"""Suffix of a file whose text is one row."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes that may follow those of text formats."""
STORE = "store:"
"""Precedes the prefix of tags whose artifacts hold rows."""

BEGINS = "relative paths are relative to the recipe's file, those of --set to the working folder"
"""Added to errors about a missing file."""

SCHEMES = ("s3", "gs", "https", "http", "hf")
"""Schemes of addresses of rows and models."""
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class NumberText(str):
    """A number with an exponent and without a dot, which remains a text in fields of texts: `1e-5` is a number, `1234e567` may
    be the beginning of a reference."""


class Written(str):
    """A text of a recipe, with the folder that it is relative to if it is a relative path.

    It exists until the recipe is validated; copies and pickles of it are plain texts.
    """

    folder: Path
    elsewhere: Path
    """The working folder, which such paths were once relative to."""
    decided: bool
    """Whether names and paths were distinguished earlier, so that the present content of the folder does not count."""
    is_number: bool
    """Whether it was a :class:`NumberText`."""

    def __new__(cls, text: str, folder: Path, elsewhere: Path, decided: bool = False) -> Written:
        written = super().__new__(cls, text)
        written.folder, written.elsewhere, written.decided = folder, elsewhere, decided
        written.is_number = is_number(text)
        return written

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def written(content: Any, folder: Path, elsewhere: Path | None = None, decided: bool = False) -> Any:
    """Plain data with every text in it (but for names of fields) as :class:`Written` in ``folder``."""
    return each_text(content, lambda text: Written(text, folder, elsewhere or folder, decided))


def plain(content: Any) -> Any:
    """The opposite of :func:`written`, for fields that hold anything and thus validate nothing: numbers are numbers."""
    return each_text(content, lambda text: number_of(text) if is_number(text) else str(text))


def with_numbers(content: Any) -> Any:
    """Plain data with numbers in place of texts that are numbers."""
    return each_text(content, lambda text: number_of(text) if is_number(text) else text)


def is_number(text: Any) -> bool:
    """Whether a text of a recipe is a number with an exponent, not in quotes."""
    return isinstance(text, NumberText) or (isinstance(text, Written) and text.is_number)


def number_of(text: str) -> float | str:
    """The number; the text if it overflows."""
    number = float(text)
    return number if math.isfinite(number) else str(text)


def each_text(content: Any, change: Callable[[str], Any]) -> Any:
    """Plain data with every text in it (but for names of fields) changed."""
    if isinstance(content, dict):
        return {name: each_text(value, change) for name, value in content.items()}
    if isinstance(content, list):
        return [each_text(value, change) for value in content]
    return change(content) if isinstance(content, str) else content


def row_suffix(name: str, as_written: bool = False) -> str | None:
    """The suffix of a file of rows, without that of a compression and in lower case (or ``as_written``): `.jsonl` of
    `rows.jsonl.gz`. None for other files."""
    path = Path(name)
    packed = path.suffix.lower() in COMPRESSIONS
    suffix = Path(path.stem).suffix if packed else path.suffix
    known = tuple(name for name in (*ROW_SUFFIXES, TEXT_SUFFIX) if not packed or name not in (".parquet", ".arrow"))
    if suffix.lower() not in known:
        return None
    return suffix if as_written else suffix.lower()


def may_be_hub_name(text: str) -> bool:
    """Whether a data set on the Hub may have this name. Once a recipe is validated, it then is one: paths are absolute."""
    return row_suffix(text) is None and _HUB_NAME.fullmatch(text) is not None


def is_written_as_path(text: str) -> bool:
    """Whether a text cannot be a name, of the Hub or of a tag."""
    return text.startswith(("./", "../", "~", "/"))


def is_address(text: str) -> bool:
    """Whether it begins with a scheme: ``s3://bucket/rows.jsonl``. Such a text is never relative to a folder."""
    return _ADDRESS.match(text) is not None


def file_of(address: str) -> str:
    """The part of an address that names a file: without the query of a URL or the version of an object."""
    return urlsplit(address).path if address.startswith("http") else address.partition("?versionId=")[0]


def _checked_address(address: str, hub: str) -> str:
    """The address, or the name of a whole repository of the Hub, which follows the prefix ``hub``.

    Raises ValueError for an unknown scheme, and for a password in the address.
    """
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"{scheme}:// cannot be read; use one of {known}, or a path")
    if "@" in urlsplit(address).netloc and scheme != "hf":
        raise ValueError(
            f"an address must not contain a user or password ({scheme}://…@): set the credentials in the environment"
        )
    name = address.removeprefix(hub).rstrip("/")
    return name if address.startswith(hub) and may_be_hub_name(name) and "/" in name else address


def arriving(data: Any) -> Any:
    """The data of a recipe to which rows are added, in which no text is a name: data sets of the Hub do not grow."""
    if isinstance(data, Written) and not data.decided and may_be_hub_name(data):
        return Written(f"./{data}", data.folder, data.elsewhere)
    if isinstance(data, list):
        return [arriving(item) for item in data]
    if isinstance(data, dict):
        return {name: arriving(value) if name in ("path", "sources") else value for name, value in data.items()}
    return data


def fixed_part(path: Path) -> tuple[Path, str]:
    """The nearest existing folder above ``path``, even with glob characters in its name, and the rest, which may be a glob."""
    folder = next((above for above in path.parents if above.is_dir()), path.parent)
    return folder, str(path.relative_to(folder))


def _exists(path: Path) -> bool:
    folder, rest = fixed_part(path)
    matches = glob.iglob(rest, root_dir=folder, recursive=True) if glob.has_magic(rest) else iter(())
    return path.exists() or next(matches, None) is not None


def _located(value: Any, is_path: Callable[[str, Path], bool], text: str | None = None) -> Any:
    """The absolute path of a value that is Written and a path (of its part ``text``), else the value itself.

    It is not normalised, because only the file system knows what `..` means after a symbolic link. Raises ValueError for a path
    that cannot be accessed, and for a file that exists in the working folder alone, which paths of the command line are
    relative to.
    """
    if not isinstance(value, Written):
        return value
    text = str(value) if text is None else text
    if not text.strip():
        raise ValueError("is empty: name a file, a folder or a repository on the Hub")
    try:
        place, other = (folder / Path(text).expanduser() for folder in (value.folder, value.elsewhere))
        is_path_here = is_path(text, place)
        only_elsewhere = place != other and not _exists(place) and _exists(other)
    except (OSError, RuntimeError) as error:  # too long a name, no permission; no such user
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ValueError(f"{text}: cannot be accessed: {reason}") from None
    if only_elsewhere:
        named = "" if is_path_here else f"; if {text} is meant as a name, run the command in another folder"
        raise ValueError(
            f"there is no {place} ({BEGINS}), but {other} exists in the working folder: write "
            f"{os.path.relpath(other, value.folder)}, or set the field with --set{named}"
        )
    return f"{place}{str(value)[len(text) :]}" if is_path_here else str(value)


def _rows(value: Any) -> Any:
    def is_path(text: str, place: Path) -> bool:
        # `data/tran` beside an existing folder `data` is a slip of the pen, not a user called "data".
        is_there = place.exists() or ("/" in text and place.parent.is_dir())
        return not may_be_hub_name(text) or (is_there and not value.decided)

    if isinstance(value, str) and is_address(value):
        return _checked_address(str(value), "hf://datasets/")
    return str(value) if isinstance(value, str) and value.startswith(STORE) else _located(value, is_path)


def _model(value: Any) -> Any:
    if isinstance(value, str) and is_address(value):
        return _checked_address(str(value), "hf://")

    def is_path(text: str, place: Path) -> bool:
        return is_written_as_path(text) or (place.is_dir() and not value.decided)

    return _located(value, is_path)


def code_path(value: Any) -> Any:
    """``file.py:name`` with the file's absolute path if it is :class:`Written`; anything else as it is."""
    file, colon, _ = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return _located(value, lambda text, place: True, file) if colon and file.endswith(".py") else value


def _folder(value: Any) -> Any:
    is_uri = isinstance(value, str) and ("://" in value or not value)
    return str(value) if is_uri else _located(value, lambda text, place: True)


def _events_target(value: Any) -> Any:
    if not isinstance(value, str) or not is_address(value):
        return _located(value, lambda text, place: True)
    if not value.startswith(("http://", "https://")):
        raise ValueError(
            f"{value.partition('://')[0]}:// takes no events; use http://, https://, or the path of a file"
        )
    if not urlsplit(value).hostname:
        raise ValueError("the address names no host; write it as http://host:port")
    if "@" in urlsplit(value).netloc or urlsplit(value).query:
        raise ValueError(
            "the address must not contain a user, a password or a query: set OPENLINEAGE_API_KEY in the environment"
        )
    return str(value)


RowsPath = Annotated[str, BeforeValidator(_rows)]
"""A file or folder of rows, a glob, an address, a name on the Hub, or ``store:`` and the beginning of tags."""
ModelPath = Annotated[str, BeforeValidator(_model)]
"""A folder that holds a model, its address, a name on the Hub, or a reference or tag of the store."""
CodePath = Annotated[str, BeforeValidator(code_path)]
"""``file.py:name``, or ``module:name``, or the name of something built in."""
FolderPath = Annotated[str, BeforeValidator(_folder)]
"""A folder that may not exist yet, or a URI."""
EventsTarget = Annotated[str, BeforeValidator(_events_target)]
"""A file that may not exist yet, or an address of a server."""
Anything = Annotated[Any, BeforeValidator(plain)]
"""Values for code outside this project."""
Values = Annotated[Any, BeforeValidator(with_numbers)]
"""Values of fields of another recipe."""
