"""Kinds of rows: one module for each, here or in an installed distribution (entry points, group ``alignment.kinds``).

A module's ``KIND`` defines its rows: the columns of the table, the formats that they can be read from, how they are rendered
and truncated, and the row that a problem of a built-in task gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from alignment_core.data.overlap import digest_of_prompt
from alignment_core.errors import UserError
from alignment_core.recipes.row_plugins import KINDS

if TYPE_CHECKING:
    from alignment_core.data.fields import Fields
    from alignment_core.data.limits import Limits
    from alignment_core.data.messages import Messages
    from alignment_core.data.tasks import Problem
    from alignment_core.data.template import Tools

KEPT = "columns"
"""The column, of kinds that have it, with the values of a source's ``keep_columns`` as the text of a JSON object."""


Lengths = tuple[int, int | None]
"""Of a sequence: the tokens that precede the targets, and the targets; None if a policy is to answer."""


class DroppedRow(ValueError):
    """The problem of a row that is left out and counted; one with any other ValueError is malformed."""

    def __init__(self, reason: str, problem: str) -> None:
        """``reason`` is a key of :data:`alignment_core.data.limits.REASONS` or of the kind's ``reasons``."""
        super().__init__(problem)
        self.reason = reason


class Example(Protocol):
    """A dataclass that holds a row as it was read, before any tokenizer; its fields hold JSON values."""

    def prompts(self) -> tuple[str, ...]:
        """Digests (see :func:`alignment_core.data.overlap.digest_of_prompt`) of the prompts that it answers.

        The last one is what precedes its last answer: rows in which it is the same are held out together.
        """

    def rows(self, limits: Limits) -> Sequence[dict[str, Any] | str]:
        """Its rows of the table, by column, or for each the reason why it is dropped. Raises ValueError if it cannot be
        rendered.

        A row of which something was cut off has :data:`alignment_core.data.limits.SHORTENED` beside its columns.
        """


@dataclass(frozen=True)
class PromptExample(ABC):
    """An example with one prompt, which gives one row."""

    prompt: str | Messages
    tools: Tools | None = field(default=None, kw_only=True)
    """Tools that the assistant can call."""

    def prompts(self) -> tuple[str, ...]:
        return (digest_of_prompt(self.prompt),)

    def rows(self, limits: Limits) -> list[dict[str, Any] | str]:
        return [self.fit(limits)]

    @abstractmethod
    def fit(self, limits: Limits) -> dict[str, Any] | str:
        """The columns of its row, or the reason why it is dropped."""


@dataclass(frozen=True)
class Format:
    """The form of a kind's rows in files."""

    needs: tuple[str, ...]
    """Required columns, by role."""
    parse: Callable[[Fields], Example]
    """Raises ValueError with the problem of a row, DroppedRow where data sets are known to have some such rows."""
    takes: tuple[str, ...] = ()
    """Optional columns, by role."""
    fits: Callable[[Fields], bool] = lambda row: True
    """Whether the first row, which has the needed columns, looks like this format; used for ``format: auto``."""


class Kind(ABC):
    """A kind of row."""

    gives: ClassVar[str]
    """Name of its rows in messages, such as ``preference pairs``."""
    columns: ClassVar[Mapping[str, str]]
    """Columns of the table and the type of each, which :func:`alignment_core.data.tables.schema` reads; a question mark
    allows nulls. ``source`` says where a row was read; ``task`` names the built-in task that made it, none for other rows."""
    formats: ClassVar[Mapping[str, Format]]
    """Formats that it can be read from, in the order in which ``auto`` tries them."""
    native: ClassVar[str]
    """The format whose columns are the fields of an example."""
    reasons: ClassVar[Mapping[str, str]] = {}
    """Why a row may be dropped, beside what :data:`alignment_core.data.limits.REASONS` has: ``12 rows …``."""
    together: ClassVar[str] = "prompt"
    """Name, in messages, of the part that rows of one group share: they are held out together."""
    policy_answers: ClassVar[bool] = False
    """Whether policies answer its rows; the table then has ``prompt``, ``prompt_ids``, ``label`` and ``task``."""
    trains_prompts: ClassVar[bool] = False
    """Whether prompts can be trained on, too (``completion_only_loss: false``)."""
    takes_images: ClassVar[bool] = False
    """Whether its rows may have images, for image-text models."""
    stream: ClassVar[str] = ""
    """The random stream by which its rows are drawn and shuffled; by default its name."""

    @abstractmethod
    def sequences(self, row: Mapping[str, Any]) -> Sequence[Lengths]:
        """Lengths of the sequences that a model makes of a row of the table."""

    def of_problem(self, problem: Problem) -> dict[str, Any]:
        """A row, in the native format, from a problem of a built-in task. Raises UserError if there is none."""
        raise UserError(f"built-in tasks do not provide {self.gives}")


def load(name: str) -> Kind:
    """The kind of this name. Raises UserError if there is none."""
    kind: Kind = KINDS.load(name)
    return kind


def stream(name: str) -> str:
    """The random stream of data sets of this kind."""
    return load(name).stream or name


def roles() -> tuple[str, ...]:
    """Roles of columns: the keys of ``DataSource.columns``."""
    every = (format for kind in KINDS.loaded()[0].values() for format in kind.formats.values())
    return tuple(dict.fromkeys(role for format in every for role in (*format.needs, *format.takes)))
