"""``align reproduce``: a run's policy from its records alone, in an empty home, to the same digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.align import Align, align_here
from tests.conftest import TinyModel

RECIPE = """
method: rl
name: small
model: {{name: {model}}}
rl:
  prompts: {{sources: [{{path: {rows}}}]}}
  rewards: [{{function: "{folder}/rewards.py:short"}}]
  steps: 2
  prompts_per_step: 4
  generation: {{num_generations: 2, max_completion_length: 6}}
resources: {{trainers: 1, engines: 1, threads: 1}}
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    home = tmp_path_factory.mktemp("home")
    rows = home / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(16)))
    (home / "rewards.py").write_text(
        "def short(completions, **_):\n    return [-float(len(text)) for text in completions]\n"
    )
    (home / "small.yaml").write_text(RECIPE.format(model=tiny_model(), rows=rows, folder=home))
    return home


@pytest.fixture(scope="module")
def policy(align: Align, home: Path) -> str:
    reference: str = align(home, "run", str(home / "small.yaml"))["outputs"]["policy"]
    return reference


@pytest.fixture(scope="module")
def again(align: Align, home: Path, policy: str) -> dict[str, Any]:
    return align(home, "reproduce", policy, "--home", str(home / "again"))


def test_a_policy_is_rebuilt_in_an_empty_home_to_the_same_digests(again: dict[str, Any], policy: str) -> None:
    assert again["same"]
    assert [(stage["stage"], stage["state"], stage["same_key"]) for stage in again["stages"]][-1] == ("rl", "run", True)
    assert {stage["state"] for stage in again["stages"]} == {"run"}
    results = [pair for stage in again["stages"] for pair in stage["outputs"].values()]
    assert all(then == now for then, now in results)
    assert policy in [now for _, now in results]


def test_the_rebuilt_records_name_the_recipe(again: dict[str, Any], home: Path, policy: str) -> None:
    shown = [
        align_here(place, "lineage", policy, "--json", "--store", str(place / "store"))
        for place in (home, home / "again")
    ]
    then, now = (json.loads(done.stdout)["up"]["artifacts"][0]["made_by"][0]["described_by"] for done in shown)
    assert now == then


def test_a_second_rebuild_takes_the_first_ones_stages(
    align: Align, again: dict[str, Any], home: Path, policy: str
) -> None:
    repeated = align(home, "reproduce", policy, "--home", str(home / "again"))
    assert {stage["state"] for stage in repeated["stages"]} == {"cached"}
    assert repeated["same"]


def test_an_edited_reward_is_named_and_nothing_runs(
    align: Align, again: dict[str, Any], home: Path, policy: str
) -> None:
    kept = (home / "rewards.py").read_text()
    try:
        (home / "rewards.py").write_text(kept.replace("-float", "float"))
        planned = align(home, "reproduce", policy, "--home", str(home / "third"), expect=1)
        assert not planned["same"]
        assert planned["stages"] == []
        differing = [step for step in planned["plan"]["steps"] if step["differs"]]
        assert [step["record"]["stage"] for step in differing] == ["rl"]
        assert not (home / "third").exists()
        text = align_here(home, "reproduce", policy, "--check", "--store", str(home / "store"))
        assert text.returncode == 1
        assert "rl: " in text.stdout
        anyway = align(home, "reproduce", policy, "--anyway", "--from", "rl", "--home", str(home / "third"), expect=1)
        assert not anyway["same"]
        assert anyway["stages"][-1]["outputs"]["policy"][0] != anyway["stages"][-1]["outputs"]["policy"][1]
    finally:
        (home / "rewards.py").write_text(kept)
