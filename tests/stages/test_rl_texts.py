"""The rl stage has its completions decoded where they are sampled: its own process decodes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.completion_text import CompletionText
from alignment_core.models.tokenizer import byte_tokenizer
from tests.stages.conftest import RunRl
from tests.stages.rl_runs import rewards_small_letters, rows_of, section_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("max_staleness", [0, 1], ids=["in turn", "ahead"])
def test_engines_decode_what_they_sample(
    max_staleness: int, run: RunRl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decodes(*_: Any) -> str:
        raise AssertionError("the stage decodes a completion itself")

    reward = rewards_small_letters(tmp_path)
    section = section_of(
        2, reward, generation={"max_completion_length": 12}, execution={"max_staleness": max_staleness}
    )
    section["rewards"].append({**reward, "skip_special_tokens": False})
    with monkeypatch.context() as patch:
        patch.setattr(CompletionText, "__call__", decodes)
        rows = rows_of(run(section)[0])
    tokenizer = byte_tokenizer()
    for row in rows:
        ids = row["completion_ids"]
        ends = row["finish_reason"] == "stop"
        assert row["completion_text"] == tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=True)
        special = tokenizer.decode(ids[:-1] if ends else ids, skip_special_tokens=False)
        for text, given in zip((row["completion_text"], special), row["rewards"], strict=True):
            assert given == pytest.approx(sum(letter.islower() for letter in text) / max(1, len(text)))
    assert len({row["completion_text"] for row in rows}) > 1
