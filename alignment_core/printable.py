"""Text of models, data and other programs, made safe for terminals and Markdown.

Terminals execute control characters: those of ASCII (C0) and of Latin-1 (C1: U+009B alone begins an escape sequence). Marks of
writing direction make text look like another text.
"""

from __future__ import annotations

import re

SHOWN_AS = "\N{REPLACEMENT CHARACTER}"
_CODES = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # writing direction
    *(0x2028, 0x2029),  # other ends of lines
    *(0xFFFE, 0xFFFF),  # no characters, which XML refuses
    *range(0xD800, 0xE000),  # half a character, which no encoding has
)
_UNSAFE = dict.fromkeys(_CODES, SHOWN_AS)
_ESCAPED = {code: f"\\u{code:04x}" for code in _CODES}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ACTIVE = re.compile(r"[\\<\[\]|]")


def printable(text: str) -> str:
    """The text with U+FFFD in place of control characters; line ends and tabs stay."""
    return text.replace("\r\n", "\n").translate(_UNSAFE)


def without_colours(text: str) -> str:
    """Output of another program: printable, without its colours."""
    return printable(_COLOURS.sub("", text))


def markdown_line(text: str) -> str:
    """The text as one line of Markdown, escaped so that it makes no link, image, HTML or table cell."""
    return _ACTIVE.sub(r"\\\g<0>", " ".join(printable(text).split()))


def escaped_json(text: str) -> str:
    """JSON with the same content in which such characters, which only strings can have, are escaped."""
    return text.translate(_ESCAPED)
