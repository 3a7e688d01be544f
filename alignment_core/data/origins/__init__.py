"""Where rows come from: one module for each field by which a data source names its rows, here or in an installed
distribution (entry points, group ``alignment.origins``). The plug-in's name is the field's, with ``-`` for ``_``.

These modules are imported with the recipes: they import neither those nor a library before a method is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from alignment_core.errors import UserError
from alignment_core.recipes.row_plugins import ORIGINS

if TYPE_CHECKING:
    from alignment_core.data.addresses import RemoteFile
    from alignment_core.data.kinds import Kind
    from alignment_core.recipes.sections.data import DataSource

DEFAULT_ROWS = 1000
"""Rows of a source without an end, where the recipe does not say how many."""

LocatedRow = tuple[str, dict[str, Any] | str]
"""File and line, or another place that an error can name, and the row, or the reason why it is malformed."""


class Pinned(Protocol):
    """A source whose content was decided: see :class:`alignment_core.data.pin.PinnedSource`."""

    @property
    def source(self) -> DataSource: ...

    @property
    def files(self) -> Sequence[Any]:
        """Files with their ``path`` and ``sha256``."""

    @property
    def remote(self) -> Sequence[RemoteFile]:
        """Files at an address."""

    @property
    def hub_commit(self) -> str | None: ...

    @property
    def name(self) -> str:
        """The result of :meth:`Origin.name`."""


class Origin(ABC):
    """A way to name rows; ``source`` has the name that the recipe gives in the field of this origin."""

    description: ClassVar[str]
    """Description of the field in the run form."""
    has_options: ClassVar[bool] = True
    """Whether it reads the ``options`` of a source. Only files and the Hub do not."""
    names_tasks: ClassVar[bool] = False
    """Whether ``task`` of a row names the built-in task that made it."""
    samples_rows: ClassVar[bool] = False
    """Whether ``rows: N`` chooses N of all rows by their digests. Otherwise it takes the first N, as of rows without an end."""

    def pin(self, source: DataSource) -> dict[str, Any]:
        """Decide which exact content the source stands for: fields of :class:`Pinned`, nothing if its settings say it.

        Raises UserError, in one sentence, for what could not be read later.
        """
        return {}

    @abstractmethod
    def name(self, pinned: Pinned) -> str:
        """Name of the source in rows and statistics; the same on every machine."""

    @abstractmethod
    def content(self, pinned: Pinned) -> dict[str, Any]:
        """The part of the stage key that identifies the rows, beside the settings of the source."""

    @abstractmethod
    def read(self, pinned: Pinned, seed: int, kind: Kind) -> Iterator[LocatedRow]:
        """The rows in their order. ``rows`` may be ignored, but must not change the first rows. An origin that
        ``samples_rows`` gives all that it has. Raises UserError if there are none for this kind."""

    def folders(self, pinned: Pinned) -> Mapping[str, str]:
        """The folders, or addresses of folders, at which relative paths of images in rows begin, by the name that the place of
        a row has before its line."""
        return {}

    def expected(self, source: DataSource) -> int | None:
        """The number of rows, if it is known without reading them."""
        return None

    def runs_others_code(self, pinned: Pinned) -> bool:
        """Whether reading imports a library, which may want torch."""
        return True


class Library(Origin):
    """A library that makes prompts, with labels that its own scorer understands."""

    @abstractmethod
    def prompts(self, source: DataSource, seed: int) -> Iterable[dict[str, Any]]:
        """Rows with ``prompt`` and ``label``."""

    def read(self, pinned: Pinned, seed: int, kind: Kind) -> Iterator[LocatedRow]:
        field = pinned.source.field
        if "prompts" not in kind.formats:
            raise UserError(f"{pinned.name}: `{field}` provides only prompts, not {kind.gives}")
        yield from located(pinned.name, self.prompts(pinned.source, seed))


def located(name: str, rows: Iterable[dict[str, Any] | str]) -> Iterator[LocatedRow]:
    """Rows with their places, such as ``task:reverse/train:1``."""
    for number, row in enumerate(rows, start=1):
        yield f"{name}:{number}", row


def origin_of(source: DataSource) -> Origin:
    """The origin that a source names."""
    origin: Origin = ORIGINS.load(source.field)
    return origin
