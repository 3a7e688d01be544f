"""Rejection sampling: which stages are submitted, when the rounds end, and one run on the real components."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.composition.graph import NotMade, StageSpec, composing
from alignment_core.composition.results import Outputs
from alignment_core.errors import DataError
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig, parse_recipe
from alignment_core.recipes.methods import method_of

TASK = {"task": "first", "rows": 20}
MODEL: dict[str, Any] = {"scratch": {"hidden_size": 16, "num_attention_heads": 2}}
REWARDS = {"rewards": [{"verifier": "task"}]}
EVALUATION = {"prompts": {**TASK, "split": "test"}, "verifier": "task"}
STOP = {"stop": {"min_gain": 0.01}}
SECTION: dict[str, Any] = {"rounds": 3, "prompts": TASK, "prompts_per_round": 8, **REWARDS}


def parsed(section: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Any:
    content = {"method": "rejection-sampling", "name": "one", "model": MODEL, "evaluation": EVALUATION}
    return parse_recipe({**content, "rejection_sampling": {**SECTION, **section}, **fields})


# ---------------------------------------------------------------- the composition


@dataclass(frozen=True)
class FixedResult:
    """A stage whose metrics are given beforehand, or that has no result."""

    label: str
    metrics: dict[str, Any] | None

    def result(self) -> Any:
        if self.metrics is None:
            raise NotMade(self.label)
        return SimpleNamespace(metrics=self.metrics)


class Composed:
    """A run that records submitted stages; ``metrics`` are those of its stages, by label."""

    def __init__(self, store: Store, metrics: Mapping[str, dict[str, Any]]) -> None:
        self.store, self.seed, self.metrics = store, 5, metrics
        self.training_data: dict[str, Any] = {}
        self.trust_remote_code = False
        self.inputs: dict[str, dict[str, str]] = {}
        self.configs: dict[str, Any] = {}
        self.streams: dict[str, str] = {}

    def submit(self, spec: StageSpec) -> Any:
        assert spec.label not in self.inputs, "submitted twice"
        inputs: dict[str, Any] = dict(spec.inputs)
        self.inputs[spec.label] = {role: stage.label for role, stage in inputs.items()}
        self.configs[spec.label] = spec.config
        self.streams[spec.label] = spec.stream
        return FixedResult(spec.label, self.metrics.get(spec.label))


def compose(tmp_path: Path, recipe: Any, metrics: Mapping[str, Any] = MappingProxyType({})) -> tuple[Composed, Outputs]:
    run = Composed(open_store(tmp_path / "store"), metrics)
    with composing(run):
        return run, method_of(recipe).compose(recipe)


def test_a_round_samples_judges_selects_the_best_and_trains(tmp_path):
    run, outputs = compose(tmp_path, parsed())
    assert run.inputs["round-2/sample"] == {"policy": "round-1/sft", "prompts": "rejection-sampling/prompts"}
    assert run.inputs["round-2/judge"] == {"rollouts": "round-2/sample", "tokenizer": "round-1/sft"}
    assert run.inputs["round-2/best"] == {"rollouts": "round-2/sample", "scores": "round-2/judge"}
    assert run.inputs["round-2/sft"] == {"model": "round-1/sft", "data": "round-2/best"}
    assert run.configs["round-2/sample"].first_prompt == 8
    assert run.streams["round-2/sample"] == run.streams["round-2/sft"] == "round-2"
    assert run.inputs["round-3/gain"] == {
        **{f"kept-{number}": f"round-{number}/best" for number in (1, 2, 3)},
        "policy-0": "start/evaluation",
        **{f"policy-{number}": f"round-{number}/evaluation" for number in (1, 2, 3)},
    }
    assert (outputs.policy.label, outputs.final, outputs.baseline) == ("round-3/sft", "round-3", "start")
    assert [label for label in run.inputs if label.endswith("gain")] == ["round-3/gain"]


def test_rounds_may_start_from_the_first_policy_and_keep_earlier_rows(tmp_path):
    run, _ = compose(tmp_path, parsed({"start_from": "initial", "keep_earlier": True}))
    assert run.inputs["round-2/sft"] == {"model": "model", "data": "round-2/best"}
    assert run.inputs["round-2/sample"]["policy"] == "round-1/sft"
    assert [run.inputs[f"round-{number}/best"].get("earlier") for number in (1, 2, 3)] == [
        None,
        "round-1/best",
        "round-2/best",
    ]


def test_no_round_is_submitted_after_a_round_without_gain(tmp_path):
    stops = {"result": "round-1", "stops": "round 2 brought no gain"}
    run, outputs = compose(tmp_path, parsed(STOP), {"round-1/gain": {"result": "round-1"}, "round-2/gain": stops})
    assert (outputs.policy.label, outputs.final) == ("round-1/sft", "round-1")
    assert not [label for label in run.inputs if label.startswith("round-3")]
    assert list(run.configs["report"].policies) == ["start", "round-1", "round-2"]
    assert list(run.inputs).index("evaluation/overlap") < list(run.inputs).index("round-1/sample")


def test_all_rounds_are_planned_while_their_gain_is_unknown(tmp_path):
    run, outputs = compose(tmp_path, parsed(STOP))
    assert [label for label in run.inputs if label.endswith("gain")] == [f"round-{n}/gain" for n in (1, 2, 3)]
    assert outputs.final == "round-3"
    planned = plan(parsed(STOP), open_store(tmp_path / "store"))
    assert [stage.label for stage in planned.stages] == list(run.inputs)


def test_a_later_round_that_keeps_nothing_is_not_trained_on(tmp_path):
    stops = {"result": "round-1", "stops": "none of the completions is left"}
    metrics = {"round-1/gain": {"result": "round-1"}, "round-2/best": {"new": 0}, "round-2/gain": stops}
    run, outputs = compose(tmp_path, parsed(STOP), metrics)
    assert outputs.final == "round-1"
    assert "round-2/sft" not in run.inputs
    empty = [run.configs[f"round-{number}/best"].may_be_empty for number in (1, 2)]
    assert empty == [False, True], "without any row of the first round there is no result"
    assert not compose(tmp_path, parsed())[0].configs["round-2/best"].may_be_empty


def test_without_an_evaluation_a_round_is_judged_by_the_samples_of_the_next(tmp_path):
    stops = {"result": "start", "stops": "round 1 brought no gain"}
    recipe = parsed(STOP, evaluation=None)
    run, outputs = compose(tmp_path, recipe, {"round-1/gain": {"result": "start"}, "round-2/gain": stops})
    assert run.inputs["round-2/gain"] == {"kept-1": "round-1/best", "kept-2": "round-2/best"}
    assert run.configs["round-2/gain"].policies == ("start", "round-1")
    assert "round-2/sft" not in run.inputs
    assert (outputs.final, outputs.policy.label, outputs.report) == ("start", "model", None)


# ---------------------------------------------------------------- on the real components


@dataclass(frozen=True)
class Done:
    """A stage that has run."""

    label: str
    stage_result: StageResult

    def result(self) -> StageResult:
        return self.stage_result

    def artifact(self) -> Reference:
        return self.stage_result.reference


class Runs:
    """A composition that runs each stage when it is submitted."""

    def __init__(self, store: Store, machines: Any, seed: int) -> None:
        self.store, self.machines, self.seed = store, machines, seed
        self.training_data: dict[str, Any] = {}
        self.trust_remote_code = False
        self.results: dict[str, StageResult] = {}

    def submit(self, spec: StageSpec) -> Any:
        inputs = {
            role: value if isinstance(value, Reference) else value.artifact() for role, value in spec.inputs.items()
        }
        settings: dict[str, Any] = {"config": spec.config.model_dump(mode="json"), "inputs": inputs}
        settings |= {"stream": spec.stream, "needs": spec.needs}
        call = StageCall(stage=spec.stage, label=spec.label, seed=self.seed, **settings)
        request = StageRequest(self.store, call, self.machines, ResourcesConfig(), lambda *_: None)
        self.results[spec.label] = run_stage(request)
        return Done(spec.label, self.results[spec.label])


@pytest.fixture
def runs(machines: Any, tmp_path: Path) -> Iterator[Runs]:
    run = Runs(open_store(tmp_path / "store"), machines(1), seed=5)
    with composing(run):
        yield run


@pytest.mark.slow
def test_rounds_end_without_gain_are_cached_and_warn_about_a_round_without_rows(runs, tiny_model):
    small = {
        "rounds": 4,
        "prompts": {"task": "first", "rows": 16},
        "prompts_per_round": 8,
        "generation": {"num_generations": 4, "max_completion_length": 4, "shard_size": 8},
        "selection": {"strategy": "top_k", "k": 2, "truncated": "keep"},
        "training": {"max_steps": 1, "batch_size": 4, "learning_rate": 1e-6},
        "stop": {"min_gain": 0.5},
    }
    evaluation = {**EVALUATION, "prompts": {"task": "first", "split": "test", "rows": 4}}
    evaluation["generation"] = {"num_generations": 1, "max_completion_length": 4}
    recipe = parsed(small, evaluation=evaluation, model=str(tiny_model()))
    outputs = method_of(recipe).compose(recipe)
    gain = runs.results["round-1/gain"].metrics
    assert gain["stops"].startswith("round 1 brought no gain"), "one tiny step changes nothing"
    assert (outputs.final, "round-2/sample" in runs.results) == ("start", False)
    kept = runs.results["round-1/best"].metrics
    assert 0 < kept["new"] == runs.results["round-1/sft"].metrics["rows"] <= 16
    section = json.loads((runs.store.fetch(runs.results["round-1/gain"].reference) / "gain.json").read_text())
    assert section["rounds"][0]["completions"] == 32

    before, runs.results = runs.results, {}
    method_of(recipe).compose(recipe)
    assert {result.state for result in runs.results.values()} == {"cached"}
    assert {label: result.reference for label, result in runs.results.items()} == {
        label: result.reference for label, result in before.items()
    }
    small["selection"] = {"min_score": 2, "truncated": "keep"}
    strict = parsed(small, evaluation=evaluation, model=str(tiny_model()))
    with pytest.raises(DataError, match=r"is left to train on .*low_score"):
        method_of(strict).compose(strict)
