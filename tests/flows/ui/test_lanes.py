"""The lanes behind an artifact: which stages are one training's, whose models are only used, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.flows.ui.lanes import ancestry, main_line
from alignment_core.artifacts import Reference
from alignment_core.artifacts.index_facts import Brief
from alignment_core.canonical import digest_of


class Graph:
    """Records in short, made by hand; the index's view of them."""

    def __init__(self) -> None:
        self.briefs: list[Brief] = []

    def stage(self, label: str, stage: str, kind: str, run: str = "one", **inputs: Reference) -> Reference:
        number = len(self.briefs)
        output = Reference(kind, digest_of([label, run]))
        at = f"2026-11-25T10:{number // 60:02}:{number % 60:02}"
        self.briefs.append(
            Brief(digest_of([label, run, "key"]), stage, label, run, at, at, 1.0, 2.0, inputs, {kind: output})
        )
        return output

    def history(self, reference: Reference) -> list[Brief]:
        makers = {output: brief for brief in self.briefs for output in brief.outputs.values()}
        found: dict[str, Brief] = {}
        waiting = [reference]
        while waiting:
            maker = makers.get(waiting.pop())
            if maker is not None and maker.key not in found:
                found[maker.key] = maker
                waiting += maker.inputs.values()
        return sorted(found.values(), key=lambda brief: brief.started_at)

    def using(self, reference: Reference) -> list[Brief]:
        return [brief for brief in self.briefs if reference in brief.inputs.values()]


@pytest.fixture
def quickstart() -> tuple[Any, dict[str, Reference]]:
    """SFT, a reward model, and two rounds of DPO on its judgements, with evaluations."""
    graph, made = Graph(), {}
    made["model"] = graph.stage("model", "base_model", "model")
    made["sft/data"] = graph.stage("sft/data", "dataset", "dataset", tokenizer=made["model"])
    made["sft"] = graph.stage("sft", "sft", "model", model=made["model"], data=made["sft/data"])
    made["judge/data"] = graph.stage("reward-model/data", "dataset", "dataset", tokenizer=made["model"])
    made["judge"] = graph.stage(
        "reward-model", "reward_model", "reward-model", model=made["sft"], data=made["judge/data"]
    )
    made["prompts"] = graph.stage("rounds/prompts", "dataset", "dataset", tokenizer=made["model"])
    policy, baseline = made["sft"], dict[str, Any]()
    for number in (1, 2):
        name = f"round-{number}"
        rollouts = graph.stage(f"{name}/generate", "generate", "rollouts", policy=policy, prompts=made["prompts"])
        scores = graph.stage(f"{name}/score", "score", "scores", rollouts=rollouts, reward_model=made["judge"])
        pairs = graph.stage(f"{name}/select", "select_pairs", "dataset", rollouts=rollouts, scores=scores)
        policy = made[name] = graph.stage(f"{name}/dpo", "dpo", "model", model=policy, data=pairs)
        sampled = graph.stage(
            f"{name}/evaluation/generate", "generate", "rollouts", policy=policy, prompts=made["prompts"]
        )
        judged = graph.stage(f"{name}/evaluation/score", "score", "scores", rollouts=sampled)
        made[f"{name}/evaluation"] = graph.stage(
            f"{name}/evaluation", "evaluate", "evaluation", scores=judged, **baseline
        )
        baseline = baseline or {"baseline_scores": judged}
    return graph, made


def test_each_training_is_a_lane_with_the_stages_that_were_run_for_it(quickstart):
    graph, made = quickstart
    found = ancestry(graph, made["round-2"])
    lanes = {lane.name: [step.label for step in lane.steps] for lane in found.lanes}
    assert lanes == {
        "model": ["model"],
        "sft": ["sft"],
        "reward-model": ["reward-model"],
        "round-1": ["round-1/generate", "round-1/score", "round-1/select", "round-1/dpo"],
        "round-2": ["round-2/generate", "round-2/score", "round-2/select", "round-2/dpo"],
    }
    assert [lane.makes for lane in found.lanes] == [
        made[name] for name in ("model", "sft", "judge", "round-1", "round-2")
    ]
    assert [lane.is_side for lane in found.lanes] == [False, False, True, False, False]


def test_data_lies_beside_the_first_lane_that_uses_it_and_later_ones_say_again(quickstart):
    graph, made = quickstart
    lanes = {lane.name: lane for lane in ancestry(graph, made["round-2"]).lanes}
    data = {name: [brief.label for brief in lane.data] for name, lane in lanes.items() if lane.data}
    assert data == {"sft": ["sft/data"], "reward-model": ["reward-model/data"], "round-1": ["rounds/prompts"]}
    assert [brief.label for brief in lanes["round-2"].again] == ["rounds/prompts"]


def test_evaluations_lie_beside_the_lane_of_their_model(quickstart):
    graph, made = quickstart
    lanes = {lane.name: lane for lane in ancestry(graph, made["round-2"]).lanes}
    assert {name: [brief.label for brief in lane.evaluations] for name, lane in lanes.items() if lane.evaluations} == {
        "round-1": ["round-1/evaluation"],
        "round-2": ["round-2/evaluation"],
    }


def test_the_rail_of_a_judge_goes_from_its_lane_to_the_last_round_that_it_judged(quickstart):
    graph, made = quickstart
    marks = [
        [(mark.track, mark.above, mark.below, mark.made, mark.used) for mark in lane.marks]
        for lane in ancestry(graph, made["round-2"]).lanes
    ]
    assert marks == [
        [(0, False, True, True, False)],
        [(0, True, True, True, False)],
        [(0, True, True, False, False), (1, False, True, True, False)],
        [(0, True, True, True, False), (1, True, True, False, True)],
        [(0, True, False, True, False), (1, True, False, False, True)],
    ]


def test_the_main_line_is_the_models_that_a_training_went_on_from(quickstart):
    graph, made = quickstart
    line = main_line(graph.history(made["round-2"]), made["round-2"])
    assert line == {made[name] for name in ("round-2", "round-1", "sft", "model")}


def test_an_artifact_that_is_no_model_ends_in_a_lane_of_its_own(quickstart):
    graph, made = quickstart
    last = ancestry(graph, made["round-1/evaluation"]).lanes[-1]
    assert [step.label for step in last.steps] == [
        "round-1/evaluation/generate",
        "round-1/evaluation/score",
        "round-1/evaluation",
    ]
    assert (last.makes, last.name, last.is_side) == (None, "round-1/evaluation", False)


@pytest.fixture
def nights() -> tuple[Any, Reference]:
    graph = Graph()
    policy = graph.stage("model", "base_model", "model", run="night-0")
    for number in range(1, 301):
        run = f"night-{number}"
        rows = graph.stage("rows", "preference-batch", "dataset", run=run)
        policy = graph.stage("dpo", "dpo", "model", run=run, model=policy, data=rows)
    return graph, policy


def test_of_many_nights_the_first_lane_and_the_last_six_are_shown(nights):
    graph, policy = nights
    found = ancestry(graph, policy)
    first, gap, *last = found.lanes
    assert (first.name, gap.left_out, [lane.run for lane in last]) == (
        "model",
        294,
        [f"night-{number}" for number in range(295, 301)],
    )
    assert len(gap.steps) == 294
    assert all(len(lane.data) == 1 for lane in last)
    assert len(ancestry(graph, policy, everything=True).lanes) == 301


def test_an_import_has_no_lanes():
    found = ancestry(Graph(), Reference("model", "1" * 64))  # type: ignore[arg-type]
    assert (found.lanes, found.history) == ([], [])
