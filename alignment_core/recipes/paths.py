"""Where the relative paths of a recipe begin: at the recipe's own file, or, given on the command line, at the working folder.

A field holds a path if its type says so, with one of the types below. What may also be a name stays one unless something of
this name is there.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
STORE = "store:"
"""Before the prefix of tags whose artifacts hold rows."""

BEGINS = "relative paths begin at the recipe's file, those of --set at the working folder"
"""What errors about a missing file add."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Written(str):
    """A text of a recipe that knows the folder at which it begins if it is a relative path.

    It lives until the recipe is validated; whatever copies or stores it makes a plain text of it.
    """

    folder: Path
    elsewhere: Path
    """The working folder, where such paths once began."""

    def __new__(cls, text: str, folder: Path, elsewhere: Path) -> Written:
        written = super().__new__(cls, text)
        written.folder, written.elsewhere = folder, elsewhere
        return written

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def written(content: Any, folder: Path, elsewhere: Path) -> Any:
    """Plain data with every text in it (but for names of fields) as :class:`Written` in ``folder``."""
    if isinstance(content, dict):
        return {name: written(value, folder, elsewhere) for name, value in content.items()}
    if isinstance(content, list):
        return [written(value, folder, elsewhere) for value in content]
    return Written(content, folder, elsewhere) if isinstance(content, str) else content


def looks_like_hub_name(given: str, path: Path) -> bool:
    """Whether ``given``, where no file or folder ``path`` is, may be a data set on the Hub."""
    if Path(given).suffix in ROW_SUFFIXES or not _HUB_NAME.fullmatch(given):
        return False
    # `data/tran` beside an existing folder `data` is a slip of the pen, not a user called "data".
    return "/" not in given or not path.parent.is_dir()


def is_written_as_path(text: str) -> bool:
    """Whether it can be no name, of the Hub or of a tag."""
    return text.startswith(("./", "../", "~", "/"))


def _place(text: str, folder: Path) -> Path:
    """``text`` as an absolute path."""
    return Path(os.path.normpath(folder / Path(text).expanduser()))


def _located(value: Any, is_path: Callable[[str, Path], bool], text: str | None = None) -> Any:
    """The absolute path of a value that is Written and a path (of its part ``text``), else the value itself.

    Raises ValueError for what lies in the working folder alone: that is where earlier versions looked.
    """
    if not isinstance(value, Written):
        return value
    text = str(value) if text is None else text
    place, other = _place(text, value.folder), _place(text, value.elsewhere)
    if place != other and not _there(place) and _there(other):
        named = "" if is_path(text, place) else f"; if {text} is meant as a name, give the command in another folder"
        raise ValueError(
            f"there is no {place} ({BEGINS}), but {other} in the working folder: write "
            f"{os.path.relpath(other, value.folder)}{named}"
        )
    return f"{place}{str(value)[len(text) :]}" if is_path(text, place) else str(value)


def _there(path: Path) -> bool:
    text = str(path)
    return path.exists() or (glob.has_magic(text) and next(glob.iglob(text, recursive=True), None) is not None)


def _rows(value: Any) -> Any:
    def is_path(text: str, place: Path) -> bool:
        return place.exists() or not looks_like_hub_name(text, place)

    return str(value) if isinstance(value, str) and value.startswith(STORE) else _located(value, is_path)


def _model(value: Any) -> Any:
    def is_path(text: str, place: Path) -> bool:
        return place.is_dir() or is_written_as_path(text)

    return _located(value, is_path)


def code_path(value: Any) -> Any:
    """``file.py:name`` with the file's absolute path if it is :class:`Written`; anything else as it is."""
    file, colon, _ = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return _located(value, lambda text, place: True, file) if colon and file.endswith(".py") else value


def _folder(value: Any) -> Any:
    is_uri = isinstance(value, str) and ("://" in value or not value)
    return str(value) if is_uri else _located(value, lambda text, place: True)


RowsPath = Annotated[str, BeforeValidator(_rows)]
"""A file or folder of rows, a glob, a name on the Hub, or ``store:`` and the beginning of tags."""
ModelPath = Annotated[str, BeforeValidator(_model)]
"""A folder that holds a model, a name on the Hub, or a reference or tag of the store."""
CodePath = Annotated[str, BeforeValidator(code_path)]
"""``file.py:name``, or ``module:name``, or the name of something built in."""
FolderPath = Annotated[str, BeforeValidator(_folder)]
"""A folder that may still have to be made, or a URI."""
