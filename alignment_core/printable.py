"""Text of models, data and other programs, made safe to show on a terminal and in Markdown.

A terminal obeys control characters: those of ASCII (C0), of Latin-1 (C1: U+009B alone begins an escape sequence), and marks of
writing direction, which let text read as something else than it is.
"""

from __future__ import annotations

import re

SHOWN_AS = "\N{REPLACEMENT CHARACTER}"
_CODES = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # writing direction
    *(0x2028, 0x2029),  # other ends of lines
    *range(0xD800, 0xE000),  # half a character, which no encoding has
)
_UNSAFE = dict.fromkeys(_CODES, SHOWN_AS)
_ESCAPED = {code: f"\\u{code:04x}" for code in _CODES}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ACTIVE = re.compile(r"[\\<\[\]|]")


def printable(text: str) -> str:
    """The text with what a terminal would obey shown as U+FFFD; ends of lines and tabs stay."""
    return text.replace("\r\n", "\n").translate(_UNSAFE)


def without_colours(text: str) -> str:
    """Output of another program: printable, without its colours."""
    return printable(_COLOURS.sub("", text))


def markdown_line(text: str) -> str:
    """The text as one line of Markdown in which it makes no link, picture, HTML or cell of a table."""
    return _ACTIVE.sub(r"\\\g<0>", " ".join(printable(text).split()))


def escaped_json(text: str) -> str:
    """JSON with the same content in which such characters are escapes: they can only be in its strings."""
    return text.translate(_ESCAPED)
