"""Taking a run up again, asking why its stages ran, and running some of them again on purpose, on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.align import Align, references, states
from tests.conftest import TinyModel

RECIPE = """
method: sft
name: small
model: {{name: {model}}}
sft: {{data: {{task: reverse, rows: 64}}, training: {{batch_size: 32, max_steps: 4}}}}
resources: {{trainers: 1, engines: 1, threads: 1}}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "small.yaml").write_text(RECIPE.format(model=tiny_model()))
    return home


@pytest.fixture(scope="module")
def first(align: Align, home: Path) -> dict[str, Any]:
    return align(home, "run", str(home / "small.yaml"))


@pytest.fixture(scope="module")
def resumed(align: Align, home: Path, first: dict[str, Any]) -> dict[str, Any]:
    """The run taken up again when nothing is left to do; that of a killed one is in tests/deployments/test_extending.py."""
    return align(home, "resume", first["run_id"][:8])


def test_a_run_that_is_complete_computes_nothing_again(resumed: dict[str, Any], first: dict[str, Any]) -> None:
    assert states(resumed) == {"model": "cached", "sft/data": "cached", "sft": "cached"}
    assert references(resumed) == references(first)


def test_explain_gives_the_reason_why_each_stage_ran_or_was_cached(
    align: Align, home: Path, first: dict[str, Any], resumed: dict[str, Any]
) -> None:
    ran = {stage["label"]: stage for stage in align(home, "explain", first["run_id"])["stages"]}
    assert (ran["sft"]["state"], ran["sft"]["why"]) == ("run", "no earlier run of this stage in this store")
    cached = {stage["label"]: stage for stage in align(home, "explain", "last")["stages"]}
    assert cached["sft"]["why"].startswith("same key as sft of ")
    assert f"run {first['run_id'][:8]}, made on " in cached["sft"]["why"]


def test_from_stage_reruns_a_stage_and_its_dependants_to_the_same_artifacts(
    align: Align, home: Path, resumed: dict[str, Any]
) -> None:
    again = align(home, "run", str(home / "small.yaml"), "--from-stage", "sft/data")
    assert states(again) == {"model": "cached", "sft/data": "run", "sft": "run"}
    assert references(again) == references(resumed)


def test_an_unknown_stage_is_refused_before_anything_starts(align: Align, home: Path, resumed: dict[str, Any]) -> None:
    known = "--from-stage stf: this recipe has no such stage; did you mean sft? There are model, sft/data, sft"
    before = {path: path.read_bytes() for path in (home / "runs").rglob("*") if path.is_file()}
    assert align(home, "run", str(home / "small.yaml"), "--from-stage", "stf", expect=2)["error"] == known
    assert align(home, "resume", resumed["run_id"], "--from-stage", "stf", expect=2)["error"] == known
    assert {path: path.read_bytes() for path in (home / "runs").rglob("*") if path.is_file()} == before


def test_an_unknown_run_is_refused_with_a_sentence(align: Align, home: Path, resumed: dict[str, Any]) -> None:
    assert "is not a run" in align(home, "resume", "ffffffffff", expect=2)["error"]
