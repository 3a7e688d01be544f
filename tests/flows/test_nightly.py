"""A week of nights with a fake clock and real stages: promotions, refusals, and the records of each night."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterType

from alignment.flows.access import TOKEN, URL
from alignment.flows.nightly import _ended
from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.lineage import Graph, Tree
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.nights.ledger import Ledger, Night
from alignment_core.recipes import load_recipe
from alignment_core.stages.dataset import ROWS
from tests.processes import wait_until

RECIPE = """
method: nightly
name: owl
seed: 1
store: {home}/store
model: {{scratch: {{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}}}
dpo:
  data: {home}/inbox
  loss: {{beta: 0.1, nll_weight: 0.2}}
  training: {{batch_size: 8, num_train_epochs: 3, learning_rate: 2.5e-3, lr_scheduler_type: constant}}
nightly: {{min_rows: 1}}
evaluation:
  prompts: {home}/prompts.jsonl
  generation: {{num_generations: 8, max_completion_length: 6}}
  verifier: "{home}/judge.py:share_of_a"
promotion: {{gates: [{{metric: accuracy, min_gain: 0}}]}}
resources: {{trainers: 1, engines: 1, threads: 1, kv_cache_mib: 16}}
"""
JUDGE = "def share_of_a(prompt, completion, label):\n    return completion.count('a') / max(1, len(completion))\n"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Week:
    """The output of the nights, and their store."""

    def __init__(self, home: Path, nights: dict[str, dict[str, Any]]) -> None:
        self.home, self.nights = home, nights
        self.store: Store = open_store(home / "store")
        recipe = load_recipe(home / "nightly.yaml")
        assert isinstance(recipe, NightlyRecipe)
        self.ledger = Ledger(self.store, recipe)

    def state(self, name: str) -> str:
        return self.nights[name]["night"]["state"]

    def reference(self, name: str, role: str) -> Reference:
        return Reference.parse(self.nights[name]["night"][role])


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory, prefect_api: dict[str, str]) -> Week:
    home = tmp_path_factory.mktemp("week")
    (home / "inbox").mkdir()
    (home / "nightly.yaml").write_text(RECIPE.format(home=home))
    (home / "judge.py").write_text(JUDGE)
    for name, first in (("prompts", 200), ("rounds", 300)):
        rows = [json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(first, first + 16)]
        (home / f"{name}.jsonl").write_text("".join(rows))
    lines = []
    for part, code in (("until_killed", -signal.SIGKILL), ("after_the_kill", 0)):
        command = [sys.executable, "-m", "tests.flows.week", str(home), part]
        environment = {**os.environ, **prefect_api, "ALIGN_HOME": str(home)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        lines += done.stdout.splitlines()
    nights = {report.pop("name"): report for report in map(json.loads, lines)}
    return Week(home, nights)


def test_a_better_night_replaces_production_and_a_worse_night_does_not(week: Week) -> None:
    assert [week.state(name) for name in ("night-1", "night-3")] == ["promoted", "refused"]
    refused = week.nights["night-3"]["night"]
    (reason,) = refused["reasons"]
    assert "less than the required 0" in reason
    assert refused["metrics"]["candidate"]["accuracy"] < refused["metrics"]["production"]["accuracy"]
    candidates = {move.to for move in week.store.tags.history("policy/production")}
    assert week.reference("night-3", "candidate") not in candidates
    assert week.store.verify(week.reference("night-3", "candidate")) == []  # kept for inspection


def test_a_metric_that_is_not_finite_leaves_the_entry_of_a_night_readable() -> None:
    """Outcomes have null for it, which is no number; later nights read the entry."""
    outcome = {
        "promotion": {"state": "refused", "reasons": ["it is nan"]},
        "stages": [],
        "outputs": {"policy": "model@sha256:" + "1" * 64},
        "metrics": {"policies": {"candidate": {"lm_eval/words/perplexity": None, "kl": 1.5}}},
    }
    entry = Night.model_validate_json(_ended(Night(night="1"), outcome).model_dump_json())
    assert math.isnan(entry.metrics["candidate"].pop("lm_eval/words/perplexity"))
    assert entry.metrics == {"candidate": {"kl": 1.5}}


def test_an_empty_night_runs_no_stage_and_is_on_record(week: Week) -> None:
    assert week.state("night-2") == "empty"
    assert week.nights["night-2"]["stages"] == {}
    assert "night-2" in [night.night for night in week.ledger.nights()]


def test_the_night_after_a_killed_night_takes_the_rows_and_finds_the_finished_stages(week: Week) -> None:
    assert "night-4" not in week.nights
    adopted = week.nights["night-5"]
    assert (week.state("night-5"), adopted["night"]["attempt"]) == ("promoted", 2)
    assert adopted["stages"]["rows"] == "cached"
    assert adopted["stages"]["production/evaluation/generate"] == "cached"  # as the candidate that it was


def test_the_slower_of_two_overlapping_nights_conflicts_and_its_rows_are_taken_again(week: Week) -> None:
    overtaken, faster, later = (week.nights[name]["night"] for name in ("night-6", "night-6b", "night-7"))
    assert (faster["state"], overtaken["state"], later["state"]) == ("promoted", "conflict", "promoted")
    assert faster["production"] == overtaken["production"]
    assert faster["batch"] != overtaken["batch"] == later["batch"]
    assert later["production"] == faster["candidate"]
    assert week.store.verify(week.reference("night-6", "candidate")) == []


def test_the_history_of_production_is_linear_and_has_exactly_the_promoted_models(week: Week) -> None:
    moves = week.store.tags.history("policy/production")
    promoted = [week.reference(name, "candidate") for name in ("night-1", "night-5", "night-6b", "night-7")]
    assert [move.to for move in moves] == promoted
    assert [move.previous for move in moves] == [None, *promoted[:-1]]
    assert [move.number for move in moves] == [1, 2, 3, 4]


def test_every_promoted_model_descends_from_its_predecessor_and_the_rows_of_its_night(week: Week) -> None:
    with Graph.of(week.store) as graph:
        for name, parent in (
            ("night-1", None),
            ("night-5", "night-1"),
            ("night-6b", "night-5"),
            ("night-7", "night-6b"),
        ):
            candidate = week.reference(name, "candidate")
            assert graph.descends(candidate, week.reference(name, "batch"))
            assert parent is None or graph.descends(candidate, week.reference(parent, "candidate"))
            nodes = Tree(graph, candidate, upward=True).nodes.values()
            for node in nodes:
                assert node.made_by, f"{node.reference} in the lineage of {name} comes from nowhere"
                origin = node.made_by[0].stage in ("base_model", "preference-batch", "dataset")
                assert node.branches or node.sources or origin
            assert len(nodes) > 4


def test_the_drift_of_all_nights_is_measured_beside_that_of_one(week: Week) -> None:
    """The first night starts from the model, so both are the same; later ones from production."""
    first, last = (week.nights[name]["night"]["metrics"]["candidate"] for name in ("night-1", "night-7"))
    assert first["kl_to_model"] == first["kl"]
    assert last["kl_to_model"] != last["kl"]
    assert last["kl_to_model.n"] == last["kl.n"]


def test_each_row_is_in_exactly_one_batch(week: Week) -> None:
    batches = {night.batch for night in week.ledger.nights() if night.batch}
    lines = [line for batch in batches for line in (week.store.fetch(batch) / ROWS).read_text().splitlines()]
    taken = [(row["prompt"], row["chosen"]) for row in map(json.loads, lines)]
    good, bad = [(f"{n}?", "aaaaaa") for n in range(96)], [(f"{n}?", "bbbbbb") for n in range(24)]
    assert sorted(taken) == sorted(good + bad)
    first = week.nights["night-1"]["night"]
    assert first["malformed_rows"] == 2
    assert [line.split(": ")[0] for line in first["malformed"]] == ["copy.jsonl:25", "sunday.jsonl:25"]


def test_a_failed_night_is_recorded_with_its_error(week: Week) -> None:
    assert "there is no such file or folder" in week.nights["night-8"]["error"]
    last = week.ledger.nights()[-1]
    assert (last.night, last.state, last.batch) == ("night-8", "failed", None)


def test_every_night_left_an_artifact_and_an_event_in_prefect(week: Week, prefect_api: dict[str, str]) -> None:
    states = {name: week.state(name) for name in week.nights if name != "night-8"} | {"night-8": "failed"}
    ended_in_peace = (
        "night-5",
        "night-6b",
        "night-6",
        "night-7",
        "night-8",
    )  # the kill may have cut off earlier events
    owl = {"event": {"prefix": ["alignment.night."]}, "resource": {"id": ["alignment.night.owl"]}}
    with SyncPrefectClient(api=prefect_api[URL], auth_string=prefect_api[TOKEN]) as client:

        def events() -> set[str]:
            answer = client.request("POST", "/events/filter", json={"filter": owl, "limit": 50})
            return {event["event"] for event in answer.json()["events"]}

        expected = {f"alignment.night.{states[name]}" for name in ended_in_peace}
        assert wait_until(lambda: events() >= expected, 60), events()  # the server writes them now and then
        markdown = ArtifactFilter(type=ArtifactFilterType(any_=["markdown"]))
        descriptions = [str(artifact.description) for artifact in client.read_artifacts(artifact_filter=markdown)]
    nights = [description for description in descriptions if description.startswith("Night ")]
    assert sorted(nights) == sorted(f"Night {name}: {state}" for name, state in states.items())
