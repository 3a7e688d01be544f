"""The real data sets, read as users would read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.build import BuiltDataset

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data (GSM8K, HH-RLHF, MT-Bench) is not here")

Build = Callable[..., BuiltDataset]


def test_gsm8k_becomes_sft_rows_by_naming_its_columns(built: Build) -> None:
    source = {"path": str(DATA / "gsm8k"), "columns": {"prompt": "question", "completion": "answer"}, "rows": 1000}
    data = built({"sources": [source], "test_rows": 50, "max_length": 2048}, "demonstrations")
    assert data.statistics["rows"] == {"read": 1000, "split": 0, "kept": 1000, "train": 950, "test": 50, "unused": 0}
    row = data.train.to_pylist()[0]
    assert row["text"].startswith("<user>")
    assert "<assistant>" in row["text"]
    assert row["text"].endswith("<eos>")
    assert bytes(row["input_ids"][-5:-1]).decode()[-1].isdigit()  # the answer ends with a number, then EOS


def test_hh_pairs_are_recognised_and_share_their_dialogue(built: Build) -> None:
    data = built(DATA / "hh-rlhf-harmless" / "test.jsonl", "preferences", max_length=4096)
    rows: list[dict[str, Any]] = data.train.to_pylist()
    assert len(rows) + data.statistics["dropped"].get("empty_completion", 0) == 200
    for row in rows:
        assert row["prompt"].startswith("<user>")
        assert row["prompt"].endswith("<assistant>")
        assert row["chosen"] != row["rejected"]
        assert "\n\nHuman:" not in row["prompt"]


def test_hh_folder_needs_no_allowance_for_bad_rows(built: Build) -> None:
    data = built(DATA / "hh-rlhf-harmless", "preferences", max_length=512, overlong="truncate")
    assert data.statistics["rows"]["read"] == 1800
    assert set(data.statistics["dropped"]) <= {"empty_completion", "identical_after_truncation"}


def test_first_turns_of_mt_bench_become_prompts(built: Build) -> None:
    source = {"path": str(DATA / "bench-prompts" / "mt_bench.jsonl"), "columns": {"prompt": "turns.0"}}
    data = built({"sources": [source], "shuffle": False, "max_length": 4096}, "prompts")
    assert data.train.num_rows == 80
    assert data.train["prompt"][0].as_py().startswith("<user>Compose an engaging travel blog post")
