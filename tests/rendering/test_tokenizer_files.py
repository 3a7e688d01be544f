"""Settings that a tokenizer's files hold: truncation, padding and side change no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from alignment_core.data.kinds import Example
from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.data.kinds.texts import Text
from alignment_core.data.template import Renderer
from tests.rendering import conversations
from tests.rendering.families import OWN, Family, build
from tests.rendering.rows import rows_of

SAVED = [family for family in OWN if family.fast]
EXAMPLES: list[Example] = [
    Demonstration([], conversations.THREE_TURNS),
    Preference(conversations.THREE_TURNS[:5], conversations.THREE_TURNS[5:], [{"role": "assistant", "content": "no"}]),
    Prompt(conversations.THREE_TURNS[:3]),
    Text("The capital of France is Paris. " * 5),
]


def _truncated(tokenizer: Any) -> None:
    tokenizer(["How are you?"], truncation=True, max_length=5)


def _padded(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_padding(length=400, pad_id=0)


def _both(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.enable_truncation(7, stride=2, direction="left")
    tokenizer.backend_tokenizer.enable_padding(pad_to_multiple_of=64, direction="left")


@pytest.mark.parametrize("settings", [_truncated, _padded, _both])
@pytest.mark.parametrize("family", SAVED, ids=str, scope="session")
def test_stored_truncation_and_padding_change_nothing(
    family: Family, renderer: Renderer, settings: Any, tmp_path: Path
) -> None:
    """The right rows are those of the same tokenizer without these settings, which other tests compare with transformers."""
    tokenizer = build(family)
    settings(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert '"truncation": null' not in (tmp_path / "tokenizer.json").read_text() or settings is _padded
    loaded = Renderer(AutoTokenizer.from_pretrained(tmp_path), stop_ids=family.stop_ids)
    for example in EXAMPLES:
        assert rows_of(example, loaded, family) == rows_of(example, renderer, family)
