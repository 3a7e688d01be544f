"""Conversations that every family renders."""

from __future__ import annotations

from typing import Any

from alignment_core.data.messages import assistant, user
from tests.rendering.families import Family

Messages = list[dict[str, Any]]

SYSTEM = [{"role": "system", "content": "Be brief."}]
ONE_TURN = [*user("How are you?"), *assistant("Fine, thanks.")]
THREE_TURNS = [
    *user("What is the capital of France?"),
    *assistant("Paris"),
    *user("And 12 + 34?\nThink step by step."),
    *assistant("12 + 34 = 46.\n\nIt is 46."),
    *user("thanks"),
    *assistant("I'm happy to help"),
]
UNICODE = [*user("Ça va à Köln?"), *assistant("日本 \U0001f44d, grüße"), *user("…"), *assistant("é")]
WHITE_SPACE = [
    *user(" two  spaces "),
    *assistant(" 46 "),
    *user("def add(a, b):\n    return a + b\n"),
    *assistant("\n    print(add(1, 2))\n\n"),
]
BY_NAME: dict[str, Messages] = {
    "one turn": ONE_TURN,
    "three turns": THREE_TURNS,
    "system message": [*SYSTEM, *THREE_TURNS[:4]],
    "unicode": UNICODE,
    "white space": WHITE_SPACE,
}


def fits(family: Family, name: str) -> bool:
    """Whether a family can render a conversation: some refuse system messages, some have no tokens for white space."""
    return (family.system or name != "system message") and (family.keeps_spaces or name != "white space")


def spelled_out(tokens: list[str]) -> Messages:
    """A conversation about the special tokens, in turns before the last."""
    return [
        *user(f"What does {tokens[0]} do?"),
        *assistant(f"Write {' and '.join(tokens)} in your text."),
        *user(f"{tokens[-1]} ends it?"),
        *assistant("yes"),
    ]
