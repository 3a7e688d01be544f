"""Conditions in prompts: a template that puts columns of a row, such as the quality of the answer, into the user's message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from string import Formatter
from typing import TYPE_CHECKING, Any

from alignment_core.data.fields import Fields, short
from alignment_core.data.images import is_image
from alignment_core.data.messages import Messages
from alignment_core.recipes.sections.data import PROMPT

if TYPE_CHECKING:
    from alignment_core.data.kinds import Example


def conditioned(example: Example, template: str, fields: Fields) -> Example:
    """The example with its first user message in the template. Raises ValueError for a row that lacks a column of it."""
    return _rewritten(example, partial(filled, template, fields=fields))


def compared(example: Example, template: str | None, fields: Fields) -> Example:
    """The example by which its row is told apart from others: with the texts that the template adds to the prompt, and without
    attributes of the answer."""
    return _rewritten(example, partial(_with_texts, template, fields=fields)) if template else example


def _rewritten(example: Example, write: Callable[[str], str]) -> Example:
    if not hasattr(example, "prompt"):
        raise ValueError("`prompt_template` needs rows with a prompt; this one is a plain text")
    prompt = example.prompt
    if isinstance(prompt, str):
        return replace(example, prompt=write(prompt))  # type: ignore[type-var]
    if (number := _first_user(prompt)) is not None:
        return replace(example, prompt=_with(prompt, number, write))  # type: ignore[type-var]
    completion = getattr(example, "completion", None)  # holds the whole conversation of the format `messages`
    if isinstance(completion, list) and (number := _first_user(completion)) is not None:
        return replace(example, completion=_with(completion, number, write))  # type: ignore[type-var]
    raise ValueError("`prompt_template` needs a message of the user, and there is none")


def filled(template: str, prompt: str, fields: Fields) -> str:
    """The template filled with the prompt and the columns. White space before a column without text is left out with it."""
    text: list[str] = []
    for literal, name, spec, _ in Formatter().parse(template):
        if name is None or name == PROMPT:
            text += [literal, prompt if name else ""]
            continue
        value = fields.column(name)
        blank = value is None or (isinstance(value, str) and not value.strip())
        if not (blank and literal.isspace() and not spec):
            text += [literal, _written(name, value, spec or "")]
    return "".join(text)


def _with_texts(template: str, prompt: str, fields: Fields) -> str:
    """The prompt with the columns of text before which the template has nothing but white space. Other columns are attributes:
    numbers, which CSV files and the stage ``attributes`` have as text, and columns in other text, as ``[by={who}]``."""
    text: list[str] = []
    for literal, name, spec, _ in Formatter().parse(template):
        between = "" if literal.strip() or not text else literal
        if name == PROMPT:
            text += [between, prompt]
        elif name is not None and not spec and not literal.strip():
            value = fields.column(name)
            if isinstance(value, str) and value.strip() and not _is_number(value):
                text += [between, value]
    return "".join(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _written(name: str, value: Any, spec: str) -> str:
    if value is None:
        raise ValueError(f"`{name}` is null; `prompt_template` needs it")
    try:
        return format(value, spec)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` is {short(value)}, which `prompt_template` cannot write as {spec!r}") from None


def _first_user(messages: Messages) -> int | None:
    return next((number for number, message in enumerate(messages) if message["role"] == "user"), None)


def _with(messages: Messages, number: int, write: Callable[[str], str]) -> Messages:
    message = messages[number]
    changed = {**message, "content": _written_content(message["content"], write)}
    return [*messages[:number], changed, *messages[number + 1 :]]


def _written_content(content: str | list[dict[str, Any]], write: Callable[[str], str]) -> str | list[dict[str, Any]]:
    """A content with its only text written anew, behind the images if it has none. Raises ValueError for several texts."""
    if isinstance(content, str):
        return write(content)
    places = [place for place, part in enumerate(content) if not is_image(part)]
    if len(places) > 1:
        raise ValueError(
            "`prompt_template` needs one text in the message of the user, and its images are between several"
        )
    place = places[0] if places else len(content)
    text = content[place]["text"] if places else ""
    return [*content[:place], {"type": "text", "text": write(text)}, *content[place + 1 :]]
