"""``align generate``: a file of prompts, a file of answers."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.console import write_file
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.recipes.load import parse_recipe
from tests.align import Align, align_here

MODEL = "{scratch: {hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}}"


@pytest.mark.slow
def test_prompts_are_answered_in_their_order_and_again_alike(align: Align, tmp_path: Path) -> None:
    rows = [{"prompt": f"prompt {number}", "label": str(number)} for number in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for file in files:
        asked = (
            "generate",
            "replaced",
            str(tmp_path / "prompts.jsonl"),
            "-o",
            str(file),
            "-n",
            "2",
            "--max-tokens",
            "5",
        )
        outcome = align(tmp_path / "home", *asked, "--set", f"model={MODEL}")
        assert (outcome["rows"], outcome["file"]) == (6, str(file))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [stage["state"] for stage in outcome["stages"] if stage["label"] == "generate"] == ["cached"]
    found = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [(one["prompt"], one["label"], one["sample"]) for one in found] == [
        (f"prompt {number}", str(number), sample) for number in range(3) for sample in range(2)
    ]
    assert {one["source"] for one in found} == {f"prompts.jsonl:{line}" for line in (1, 2, 3)}
    assert all(isinstance(one["completion"], str) and one["finish_reason"] in ("stop", "length") for one in found)


@pytest.mark.parametrize(
    ("output", "says"),
    [("there.jsonl", "is there already: give another --output, or --overwrite"), ("no/such/a.jsonl", "no such folder")],
)
def test_what_is_there_is_not_written_over(output: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    done = align_here(tmp_path / "home", "generate", "a/model", "prompts.jsonl", "-o", str(tmp_path / output))
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    assert (tmp_path / "there.jsonl").read_text() == "mine"


def test_a_file_that_finds_no_room_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"out\.jsonl cannot be written: File too large"):
            write_file(tmp_path / "out.jsonl", "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []
    write_file(tmp_path / "out.jsonl", "x" * 5000)
    assert (tmp_path / "out.jsonl").stat().st_size == 5000


def test_a_recipe_of_it_only_samples() -> None:
    content: dict[str, Any] = {"method": "generate", "name": "a", "model": "m/m", "generate": {"prompts": "p.jsonl"}}
    assert parse_recipe(content).generate.generation.num_generations == 1  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="`evaluation` has no effect, as this recipe only samples"):
        parse_recipe({**content, "evaluation": {"prompts": "p.jsonl"}})
