"""Reward functions that measure the length of completions."""

from __future__ import annotations

from alignment_core.rewards.length import words


def test_words_are_separated_by_white_space() -> None:
    assert words([{"completion": text} for text in ("", "It's well-known.", " one\n two\tthree ")]) == [0, 2, 3]
