"""From the columns of one row to an example: what is the prompt, what is the answer, and is it well formed."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alignment_core.errors import UserError

Purpose = Literal["sft", "preference", "prompts"]
Messages = list[dict[str, Any]]

ROLES = ("prompt", "completion", "messages", "text", "chosen", "rejected", "margin", "label", "task")
"""What a column can be used as; the keys of ``DataSource.columns``."""

NEEDS = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "hh": ("chosen", "rejected"),
    "prompts": ("prompt",),
    "text": ("text",),
}
"""Columns that each format cannot do without, by role."""

CANDIDATES: dict[Purpose, tuple[str, ...]] = {
    "sft": ("messages", "prompt_completion", "text", "preference", "hh"),
    "preference": ("preference", "hh"),
    "prompts": ("prompts", "messages", "preference", "hh", "prompt_completion"),
}
"""Formats that can serve a purpose, in the order in which `auto` tries them."""

_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class SftExample:
    """``prompt`` none: ``completion`` is plain text, all of it a target. Otherwise the assistant's words in
    ``completion`` are the targets; both are strings or both are messages."""

    prompt: str | Messages | None
    completion: str | Messages


@dataclass(frozen=True)
class PreferenceExample:
    """One prompt and two answers to it: all strings, or all messages (then each answer is one assistant message)."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    margin: float | None = None


@dataclass(frozen=True)
class PromptExample:
    """A prompt, with the right answer where one is known and the built-in task that can verify it."""

    prompt: str | Messages
    label: str | None = None
    task: str | None = None


Example = SftExample | PreferenceExample | PromptExample


def check_columns(columns: Mapping[str, str]) -> None:
    """Raise UserError if ``columns`` names a role that does not exist."""
    for role in columns:
        if role not in ROLES:
            near = difflib.get_close_matches(role, ROLES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known roles: {', '.join(ROLES)}"
            raise UserError(f"columns: there is no role {role!r}; {hint}")


def check_format(format: str, purpose: Purpose) -> None:
    """Raise UserError if rows of this format cannot serve this purpose."""
    if format != "auto" and format not in CANDIDATES[purpose]:
        raise UserError(
            f"format {format!r} cannot give {_PRODUCT[purpose]}; choose one of {', '.join(CANDIDATES[purpose])}"
        )


_PRODUCT: dict[Purpose, str] = {"sft": "SFT rows", "preference": "preference pairs", "prompts": "prompts"}


def detect(values: Mapping[str, Any], format: str, columns: Mapping[str, str], purpose: Purpose) -> str:
    """The format of a data set, decided by its first row; ``format`` is what the recipe says.

    Raises UserError that lists what was looked for and what was found.
    """
    found = f"the first row has {', '.join(map(str, values)) or 'no columns'}"
    for role, column in columns.items():
        if _lookup(values, column) is _ABSENT:
            near = difflib.get_close_matches(column, list(map(str, values)), n=1, cutoff=0.6)
            raise UserError(
                f"columns: `{role}` is to come from column {column!r}, but {found}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    present = {role for role in ROLES if _lookup(values, columns.get(role, role)) is not _ABSENT}
    for candidate in CANDIDATES[purpose] if format == "auto" else (format,):
        if present.issuperset(NEEDS[candidate]):
            return _hh_or_preference(values, columns) if format == "auto" and candidate == "preference" else candidate
    wanted = [c for c in CANDIDATES[purpose] if c != "hh"] if format == "auto" else [format]
    looked = ", or ".join(" and ".join(f"`{role}`" for role in NEEDS[candidate]) for candidate in wanted)
    raise UserError(
        f"cannot read {_PRODUCT[purpose]} from these columns: looked for {looked}; {found}. "
        f"Name the columns with `columns`, such as {{{NEEDS[wanted[0]][0]}: {next(iter(values), 'column')}}}"
    )


def _hh_or_preference(values: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    texts = [_lookup(values, columns.get(role, role)) for role in ("chosen", "rejected")]
    return "hh" if all(isinstance(text, str) and text.startswith("\n\nHuman:") for text in texts) else "preference"


def parse(values: Mapping[str, Any], format: str, columns: Mapping[str, str], purpose: Purpose) -> Example:
    """The example in a row, for the format that ``detect`` decided. Raises ValueError that says what is wrong."""
    row = _Columns(values, columns)
    if format == "text":
        return SftExample(None, row.text("text"))
    if format in ("preference", "hh"):
        pair = _hh_pair(row) if format == "hh" else _preference(row)
        if purpose == "preference":
            return pair
        return SftExample(pair.prompt, pair.chosen) if purpose == "sft" else PromptExample(pair.prompt)
    if format == "messages":
        messages = row.messages("messages")
        return SftExample(*_trained_part(messages)) if purpose == "sft" else _prompt_example(_open_end(messages), row)
    prompt = row.text_or_messages("prompt")
    if not prompt:
        raise ValueError("`prompt` is empty")
    if purpose == "prompts":
        return _prompt_example(prompt, row)
    completion = row.text_or_messages("completion")
    prompt, completion = _same_kind(prompt, completion)
    if not isinstance(completion, str) and not any(message["role"] == "assistant" for message in completion):
        raise ValueError("`completion` has no assistant message")
    return SftExample(prompt, completion)


def _prompt_example(prompt: str | Messages, row: _Columns) -> PromptExample:
    return PromptExample(prompt, row.label(), row.optional_text("task"))


def _trained_part(messages: Messages) -> tuple[Messages, Messages]:
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("`messages` has no assistant message, so there is nothing to train on")
    if messages[0]["role"] == "assistant":
        raise ValueError("`messages` begins with an assistant message; there is no prompt before it")
    return [], messages


def _open_end(messages: Messages) -> Messages:
    """The conversation without the answer at its end: what a model would be asked to continue."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise ValueError("`messages` holds only assistant messages; there is no prompt")
    return messages[:end]


def _preference(row: _Columns) -> PreferenceExample:
    chosen, rejected = row.text_or_messages("chosen"), row.text_or_messages("rejected")
    if row.has("prompt"):
        prompt = row.text_or_messages("prompt")
        if not prompt:
            raise ValueError("`prompt` is empty")
    elif isinstance(chosen, str) or isinstance(rejected, str):
        raise ValueError("there is no `prompt`: without one, `chosen` and `rejected` must be whole conversations")
    else:
        prompt, chosen, rejected = _split_conversations(chosen, rejected)
    if any(not isinstance(part, str) for part in (prompt, chosen, rejected)):
        prompt = _as_messages(prompt, "user")
        chosen = _after(prompt, _as_messages(chosen, "assistant"))
        rejected = _after(prompt, _as_messages(rejected, "assistant"))
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if len(answer) != 1 or answer[0]["role"] != "assistant":
                roles = ", ".join(message["role"] for message in answer) or "nothing"
                raise ValueError(f"`{name}` must be one assistant message after the prompt, this is {roles}")
    return PreferenceExample(prompt, chosen, rejected, row.number("margin"))


def _after(prompt: Messages, answer: Messages) -> Messages:
    """Many data sets give the prompt a column of its own and repeat it in front of both answers."""
    return answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer


def _hh_pair(row: _Columns) -> PreferenceExample:
    conversations = [_hh_messages(row.text(name), name) for name in ("chosen", "rejected")]
    return PreferenceExample(*_split_conversations(*conversations), row.number("margin"))


def _hh_messages(text: str, name: str) -> Messages:
    """Turns of a dialogue such as "\\n\\nHuman: hi\\n\\nAssistant: hello". Neighbours of one speaker become one turn,
    as a turn whose own text holds the marker would otherwise break the alternation that chat templates ask for."""
    head, *parts = _HH_TURN.split(text)
    if head.strip() or not parts or parts[0] != "Human":
        raise ValueError(f"`{name}` does not begin with '\\n\\nHuman:': {_short(text)}")
    messages: Messages = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role, content = _SPEAKERS[speaker], content.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = "\n\n".join(filter(None, (messages[-1]["content"], content)))
        else:
            messages.append({"role": role, "content": content})
    return messages


def _split_conversations(chosen: Messages, rejected: Messages) -> tuple[Messages, Messages, Messages]:
    """The shared prompt and the two answers of two whole conversations that differ in their last message alone."""
    for name, conversation in (("chosen", chosen), ("rejected", rejected)):
        if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
            raise ValueError(f"`{name}` must hold a prompt and end with an assistant message")
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("`chosen` and `rejected` differ before their last message; they must share the whole prompt")
    return chosen[:-1], chosen[-1:], rejected[-1:]


def _same_kind(prompt: str | Messages, completion: str | Messages) -> tuple[str | Messages, str | Messages]:
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, completion
    return _as_messages(prompt, "user"), _as_messages(completion, "assistant")


def _as_messages(value: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


_ABSENT = object()


def _lookup(values: Any, column: str) -> Any:
    """The value of a column; ``turns.0`` and ``meta.answer`` reach into lists and objects."""
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


class _Columns:
    """Typed access to a row by role; every refusal names the column as the user knows it."""

    def __init__(self, values: Mapping[str, Any], columns: Mapping[str, str]) -> None:
        self._values, self._keys = values, columns

    def has(self, role: str) -> bool:
        return self._get(role) not in (_ABSENT, None)

    def text(self, role: str) -> str:
        return _checked_text(self._needed(role), f"`{self._name(role)}`")

    def messages(self, role: str) -> Messages:
        return _checked_messages(self._needed(role), self._name(role))

    def text_or_messages(self, role: str) -> str | Messages:
        value, name = self._needed(role), self._name(role)
        if isinstance(value, str):
            return _checked_text(value, f"`{name}`")
        if isinstance(value, list):
            return _checked_messages(value, name)
        raise ValueError(f"`{name}` is {_kind(value)}; text or a list of messages is needed")

    def optional_text(self, role: str) -> str | None:
        return self.text(role) if self.has(role) else None

    def label(self) -> str | None:
        value = self._get("label")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self.optional_text("label")

    def number(self, role: str) -> float | None:
        if not self.has(role) or self._get(role) == "":  # CSV has no other way to leave a number out
            return None
        value, name = self._get(role), self._name(role)
        try:
            number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            number = None
        if number is None:
            raise ValueError(f"`{name}` is {_kind(value)}; a number is needed")
        if not math.isfinite(number):
            raise ValueError(f"`{name}` is {number}; a finite number is needed")
        return number

    def _name(self, role: str) -> str:
        return self._keys.get(role, role)

    def _get(self, role: str) -> Any:
        return _lookup(self._values, self._name(role))

    def _needed(self, role: str) -> Any:
        value = self._get(role)
        if value is _ABSENT:
            raise ValueError(f"there is no `{self._name(role)}`; the row has {', '.join(self._values) or 'no columns'}")
        return value


def _checked_messages(value: Any, name: str) -> Messages:
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is {_kind(value)}; a list of messages is needed")
    if not value:
        raise ValueError(f"`{name}` is an empty list; at least one message is needed")
    return [_checked_message(message, f"{name}[{index}]") for index, message in enumerate(value)]


def _checked_message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"`{name}` is {_kind(value)}; an object with `role` and `content` is needed")
    for field in ("role", "content"):
        if field not in value:
            raise ValueError(f"`{name}` has no `{field}`; it has {', '.join(map(str, value)) or 'no fields'}")
        _checked_text(value[field], f"`{name}.{field}`")
    if value["role"] not in _MESSAGE_ROLES:
        raise ValueError(f"`{name}.role` is {_short(value['role'])}; roles are {', '.join(_MESSAGE_ROLES)}")
    # Parquet gives every message every field that any message has: a null there means that the field is absent.
    return {field: item for field, item in value.items() if item is not None}


def _checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_kind(value)}; text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: {value[error.start]!a} at character {error.start + 1} is half a character"
        ) from None
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {_short(value)}"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
