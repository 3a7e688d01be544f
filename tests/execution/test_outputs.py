"""A stage with several outputs: which are published, which one other stages get, and reruns for pruned ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alignment.tasks.stage import _call
from alignment_core.artifacts import Store
from alignment_core.artifacts.retention import prune
from alignment_core.composition.graph import artifact, composing, submit
from alignment_core.composition.plan import Plan
from alignment_core.errors import UserError
from alignment_core.execution.base import Stage, StageCall, StageConfig, StageContext, StageResult
from alignment_core.execution.key import key_of
from tests.artifacts.conftest import age
from tests.stages.calls import offer, run_alone

OUTPUTS = {"policy": "model", "best": "model", "trajectories": "trajectories"}


class LearnConfig(StageConfig):
    """Which outputs to make."""

    makes: list[str]


def learn(context: StageContext, config: LearnConfig) -> dict[str, Any]:
    assert context.output == context.outputs["policy"]
    for name in config.makes:
        (context.outputs[name] / "file").write_text(name)
    return {"made": len(config.makes)}


@pytest.fixture(autouse=True)
def stage(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, Stage("learn", 1, OUTPUTS, LearnConfig, learn))


def call(*makes: str, **more: Any) -> StageCall:
    return StageCall(stage="learn", label="rl", config={"makes": list(makes)}, inputs={}, **more)


@pytest.fixture
def run(store: Store) -> Callable[..., StageResult]:
    return lambda call: run_alone(store, call)


@pytest.fixture
def planned(store: Store) -> Iterator[Plan]:
    plan = Plan(store, 0)
    with composing(plan):
        yield plan


def drop_trajectories(store: Store) -> None:
    age(store, 2)
    assert [garbage.what for garbage in prune(store, None, 1, delete=True)] == ["trajectories"]


def test_each_output_is_an_artifact_of_its_kind_and_empty_outputs_are_not_published(run: Any, store: Store) -> None:
    result = run(call("policy", "trajectories"))
    assert {name: reference.kind for name, reference in result.outputs.items()} == {
        "policy": "model",
        "trajectories": "trajectories",
    }
    assert result.reference == result.outputs["policy"]
    assert (store.fetch(result.outputs["trajectories"]) / "file").read_text() == "trajectories"
    with pytest.raises(UserError, match="rl made no output 'best'; there are policy, trajectories"):
        result.output("best")
    again = run(call("policy", "trajectories"))
    assert (again.state, again.outputs) == ("cached", result.outputs)


def test_a_stage_without_its_default_output_is_not_finished(run: Any, store: Store) -> None:
    with pytest.raises(UserError, match="holds no file"):
        run(call("best"))
    assert list(store.records.all()) == []


def test_pruned_trajectories_are_recomputed_only_for_a_composition_that_needs_them(run: Any, store: Store) -> None:
    first = run(call(*OUTPUTS))
    drop_trajectories(store)
    assert run(call(*OUTPUTS)).state == "cached"
    needing = call(*OUTPUTS, needs=("trajectories",))
    assert key_of(needing).value == key_of(call(*OUTPUTS)).value
    again = run(needing)
    assert (again.state, again.reason) == ("run", "its artifact is pruned, gone or damaged")
    assert again.outputs == first.outputs
    assert run(needing).state == "cached"


def test_a_step_stands_for_the_named_output_in_other_stages(run: Any, store: Store, planned: Plan) -> None:
    result = run(call(*OUTPUTS))
    step = submit("learn", "rl", LearnConfig(makes=list(OUTPUTS)), {})
    assert artifact(step) == result.outputs["policy"]
    assert artifact(step.output("best")) == result.outputs["best"]
    best: Any = submit("learn", "next", LearnConfig(makes=["policy"]), {"policy": step.output("best"), "start": step})
    assert best.inputs["policy"].reference == result.outputs["best"]
    assert [stage.label for stage in planned.stages] == ["rl", "next"]

    with pytest.raises(UserError, match="rl: the stage learn has no output 'bst'; it has policy, best, trajectories"):
        step.output("bst")
    with pytest.raises(UserError, match=r"retention may delete .* submit the stage with needs=\('trajectories',\)"):
        step.output("trajectories")

    later = submit("learn", "later", LearnConfig(makes=["best", "policy"]), {})
    assert artifact(later.output("best")) is None, "it is only planned"


def test_a_plan_counts_a_stage_as_cached_if_its_needed_outputs_are_there(run: Any, store: Store, planned: Plan) -> None:
    run(call(*OUTPUTS))
    drop_trajectories(store)
    config = LearnConfig(makes=list(OUTPUTS))
    cached: Any = submit("learn", "rl", config, {})
    assert cached.state == "cached"
    needing: Any = submit("learn", "rl", config, {}, needs=("trajectories",))
    assert needing.state == "runs"
    assert artifact(needing.output("trajectories")) is None


def test_a_task_takes_the_named_output_of_the_stage_before(run: Any) -> None:
    result = run(call(*OUTPUTS))
    plain = result.model_dump(mode="json")
    assert plain["reference"] == str(result.reference), "as `align run --json` prints it"
    older = plain | {"accepted": {"torch": "2.12.0"}}
    inputs = {"best": [older, "best"], "default": [plain, None], "given": str(result.outputs["trajectories"])}
    taken = _call({"stage": "learn", "label": "next", "config": {}}, inputs)
    assert taken.accepted == {"best": {"torch": "2.12.0"}}
    assert taken.inputs == {
        "best": result.outputs["best"],
        "default": result.outputs["policy"],
        "given": result.outputs["trajectories"],
    }
