"""From the columns of one row to typed values: text, messages, numbers, with one sentence for each error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from alignment_core.data.images import is_image
from alignment_core.data.message_fields import (
    in_parts,
    split_at_placeholders,
    untrained,
    with_images,
    without_weights,
)
from alignment_core.data.messages import Messages
from alignment_core.data.sharegpt import is_sharegpt, to_message

if TYPE_CHECKING:
    from alignment_core.data.image_reader import RowImages

_MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")
_ABSENT = object()
_OTHER_NAMES = {"messages": "conversations"}
"""A role's second column name, for rows without a column of its first name."""


class ArrowRow(dict[str, Any]):
    """A row of a column format, whose structs have every field that those of any row have: a null in a struct stands for a
    field that is absent. In rows of text formats a null is a value."""

    def unpadded(self) -> dict[str, Any]:
        """A plain row without these nulls, as a text format would hold it."""
        return {name: without_padding(value) for name, value in self.items()}


def without_padding(value: Any) -> Any:
    """A value of a column format without the nulls in its structs."""
    if isinstance(value, dict):
        return {name: without_padding(item) for name, item in value.items() if item is not None}
    return [without_padding(item) for item in value] if isinstance(value, list) else value


def lookup(values: Any, column: str) -> Any:
    """The value of a column; ``turns.0`` and ``meta.answer`` reach into lists and objects. ``_ABSENT`` if there is none."""
    if isinstance(values, Mapping) and column in values:
        return values[column]
    for step in column.split("."):
        if isinstance(values, Mapping) and step in values:
            values = values[step]
        elif (
            isinstance(values, Sequence) and not isinstance(values, str) and step.isdigit() and int(step) < len(values)
        ):
            values = values[int(step)]
        else:
            return _ABSENT
    return values


class Fields:
    """Typed access to a row by role; every error names the column as the user knows it.

    All values that it returns can be stored as JSON.
    """

    def __init__(self, values: Mapping[str, Any], columns: Mapping[str, str], images: RowImages | None = None) -> None:
        """``images`` reads the row's images; None where the model or the kind of rows takes text alone."""
        self._values = values
        self._images = images
        self._digests: list[str] | None = None
        self._from_column: dict[str, int] = {}
        """How many images of the row's own column the messages of each role have."""
        self._mapped = columns
        self._keys = {**columns}
        for role, name in _OTHER_NAMES.items():
            if role not in columns and role not in values and isinstance(values.get(name), list):
                self._keys[role] = name
        self._padded = isinstance(values, ArrowRow)
        self._read: set[str] = set()
        """Columns that were read so far."""

    def is_explicit(self, role: str) -> bool:
        """Whether the recipe maps the role to a column, or a column has the role's name."""
        return role in self._mapped or role in self._values

    def holds(self, role: str) -> bool:
        """Whether the row has the column, with a value or null."""
        return self._get(role) is not _ABSENT

    def has(self, role: str) -> bool:
        return self._get(role) not in (_ABSENT, None)

    def value(self, role: str) -> Any:
        """The value, unchecked; None if there is none."""
        value = self._get(role)
        return None if value is _ABSENT else value

    def name(self, role: str) -> str:
        """The column of a role."""
        return self._keys.get(role, role)

    def prompt(self) -> str | Messages:
        """The role ``prompt``, not empty."""
        prompt = self.text_or_messages("prompt")
        if isinstance(prompt, str) and self._images is not None and self._column_images():
            prompt = self._placed([{"role": "user", "content": prompt}], "prompt")
        if not prompt:
            raise ValueError("`prompt` is empty")
        return prompt

    def text(self, role: str) -> str:
        return _checked_text(self._needed(role), f"`{self.name(role)}`")

    def messages(self, role: str) -> Messages:
        messages = without_weights(self._messages(self._needed(role), self.name(role)), self.name(role))
        return self._placed(messages, role)

    def conversations(self) -> Messages | None:
        """The messages of a column that the recipe names, or else of ShareGPT's column ``conversations``; None without one."""
        named = "messages" in self._mapped or self.name("messages") == "conversations"
        return self.messages("messages") if named else None

    def text_or_messages(self, role: str) -> str | Messages:
        value, name = self._needed(role), self.name(role)
        if isinstance(value, str):
            return _checked_text(value, f"`{name}`")
        if is_sharegpt(value):  # an answer as one message
            value = [value]
        if isinstance(value, list):
            return self._placed(without_weights(self._messages(value, name), name), role)
        raise ValueError(f"`{name}` is {kind_of(value)}; text or a list of messages is needed")

    def untrained(self, role: str) -> list[int]:
        """The places of the assistant turns in the messages of a role that are not to be trained, by their own weights."""
        value, name = self.value(role), self.name(role)
        return untrained(self._messages(value, name), name) if isinstance(value, list) else []

    def _messages(self, value: Any, name: str) -> Messages:
        if not isinstance(value, list):
            raise ValueError(f"`{name}` is {kind_of(value)}; a list of messages is needed")
        if not value:
            raise ValueError(f"`{name}` is an empty list; at least one message is needed")
        messages = [
            _checked_message(message, f"{name}[{index}]", self._padded, self._images)
            for index, message in enumerate(value)
        ]
        if (
            is_sharegpt(value[0])
            and messages[0]["role"] != "system"
            and name == "conversations"
            and self.value("system")
        ):
            return [{"role": "system", "content": self.text("system")}, *messages]
        return messages

    def check_images(self) -> None:
        """Raise ValueError if the row's own column has images that no message took."""
        most = max(self._from_column.values(), default=0)
        if most and most < (count := len(self._column_images())):
            raise ValueError(f"`{self._image_column()}` has {count} images, and the messages have places for {most}")

    def _placed(self, messages: Messages, role: str) -> Messages:
        """The messages with the images of the row's own column; a completion takes those that are left by the prompt."""
        if self._images is None:
            return messages
        if self._column_images():
            messages = split_at_placeholders(messages)
        start = self._from_column.get("prompt", 0) if role == "completion" else 0
        placed, count = with_images(
            messages, self._column_images()[start:], self.name(role), first_turn=role != "completion"
        )
        if count:
            self._from_column[role] = start + count
        return placed

    def _column_images(self) -> list[str]:
        """The digests of the images in the row's own column."""
        if self._digests is None:
            column = self._image_column()
            value = self.column(column) if self._has_something(column) else []
            several = value if isinstance(value, list) else [value]
            read = self._images
            assert read is not None
            self._digests = [
                read(image, f"{column}[{at}]" if value is several else column) for at, image in enumerate(several)
            ]
        return self._digests

    def _image_column(self) -> str:
        """The column of the row's images: `images`, or else `image`, where the recipe names none."""
        named = self.name("images")
        return "image" if named == "images" and self._values.get("images") is None else named

    def _has_something(self, name: str) -> bool:
        """Whether there is something in a column, by its own name."""
        value = lookup(self._values, name)
        return value is not _ABSENT and not _is_blank(value)

    def tools(self) -> list[dict[str, Any]] | None:
        """The role ``tools``: schemas of functions, as a list or as its JSON text; None if there are none."""
        value, name = self.value("tools"), self.name("tools")
        padded = self._padded and not isinstance(value, str)
        if isinstance(value, str):
            try:
                value = json.loads(value or "[]")
            except (ValueError, RecursionError):
                raise ValueError(f"`{name}` is not the JSON text of a list: {short(value)}") from None
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(isinstance(schema, dict) for schema in value):
            raise ValueError(f"`{name}` is {kind_of(value)}; a list of schemas of functions is needed")
        return [without_padding(schema) for schema in value] if padded else value

    def optional_text(self, role: str) -> str | None:
        return self.text(role) if self.has(role) else None

    def label(self) -> str | None:
        """The role ``label`` as text. A number is written out in decimal digits, a whole one without a point: 18.0, as a column
        of whole numbers with gaps holds 18, is "18"."""
        value = self._get("label")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if isinstance(value, float) and math.isfinite(value):
            return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
        return self.optional_text("label")

    def truth(self, role: str) -> bool:
        value = self._needed(role)
        if not isinstance(value, bool):
            raise ValueError(f"`{self.name(role)}` is {kind_of(value)}; true or false is needed")
        return value

    def number(self, role: str) -> float | None:
        if not self.has(role) or self._get(role) == "":  # CSV has no other way to leave a number out
            return None
        value, name = self._get(role), self.name(role)
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            number = None
        if number is None:
            raise ValueError(f"`{name}` is {kind_of(value)}; a number is needed")
        if not math.isfinite(number):
            raise ValueError(f"`{name}` is {number}; a finite number is needed")
        return number

    def kept(self, columns: Sequence[str]) -> str | None:
        """These columns, by their own names, as the text of a JSON object; None for none of them."""
        if not columns:
            return None
        kept = {}
        for column in columns:
            value = kept[column] = self.column(column)
            try:
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
            except (TypeError, ValueError):
                raise ValueError(
                    f"`{column}` is in `keep_columns`, but contains a value that JSON cannot represent: {short(value)}"
                ) from None
        return json.dumps(kept, ensure_ascii=False)

    def unread(self, names: Sequence[str]) -> list[str]:
        """Those of the columns ``names`` that have a value and were not read so far."""
        unread = [name for name in names if name in self._values and name not in self._read]
        return [name for name in unread if not _is_blank(self._values[name])]

    def column(self, name: str) -> Any:
        """The value of a column by its own name. Raises ValueError if there is none."""
        self._read.add(name)
        value = lookup(self._values, name)
        if value is _ABSENT:
            raise self._absent(name)
        return value

    def _get(self, role: str) -> Any:
        self._read.add(self.name(role))
        return lookup(self._values, self.name(role))

    def _needed(self, role: str) -> Any:
        value = self._get(role)
        if value is _ABSENT:
            raise self._absent(self.name(role))
        return value

    def _absent(self, column: str) -> ValueError:
        return ValueError(f"there is no `{column}`; the row has {', '.join(self._values) or 'no columns'}")


def _is_blank(value: Any) -> bool:
    """Whether there is nothing in a column; an array of a decoded image has no truth value."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def _checked_message(value: Any, name: str, padded: bool, images: RowImages | None) -> dict[str, Any]:
    """A message without fields that are null; with ``padded`` nulls at any depth stand for fields that are absent."""
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is {kind_of(value)}; an object with `role` and `content` is needed")
    value = {field: without_padding(item) if padded else item for field, item in value.items()}
    value = to_message(value, name) if is_sharegpt(value) else value
    value = in_parts(value, name, images)
    if value.get("role") == "assistant" and value.get("tool_calls") and value.get("content") is None:
        value = {**value, "content": ""}
    for field in ("role", "content"):
        if field not in value:
            raise ValueError(f"`{name}` has no `{field}`; it has {', '.join(map(str, value)) or 'no fields'}")
        for text in _texts(value[field]):
            _checked_text(text, f"`{name}.{field}`")
    if value["role"] not in _MESSAGE_ROLES:
        raise ValueError(f"`{name}.role` is {short(value['role'])}; roles are {', '.join(_MESSAGE_ROLES)}")
    message = {field: item for field, item in value.items() if item is not None}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [
            _with_arguments(call, f"{name}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return message


def _texts(value: Any) -> list[Any]:
    """The texts of a content with images; other values as they are."""
    has_images = isinstance(value, list) and any(map(is_image, value))
    return [part["text"] for part in value if not is_image(part)] if has_images else [value]


def _with_arguments(call: Any, name: str) -> Any:
    """A call with its arguments as an object, which chat templates write as JSON themselves; OpenAI's form has the text of
    one."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], f"{name}.function")}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"`{name}.arguments` is {kind_of(text)}, not the JSON text of an object")
    return {**call, "arguments": arguments}


def _checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {kind_of(value)}; text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: {value[error.start]!a} at character {error.start + 1} is an unpaired surrogate"
        ) from None
    return value


def kind_of(value: Any) -> str:
    """The type of a value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {short(value)}"
    if isinstance(value, str):
        return f"the text {short(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def short(value: Any) -> str:
    """A value, cut to what fits into a message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
