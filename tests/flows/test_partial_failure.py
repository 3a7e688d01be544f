"""Branches of a run are independent: one that fails ends none of the others, and is listed with its reason."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Completed, Failed, Pending

from alignment.flows.cli.run import PARTLY_FAILED
from alignment.flows.planning import plan
from alignment.tasks import stage as stage_tasks
from alignment.tasks.stage import Run, SubmittedStage
from alignment_core.artifacts import open_store
from alignment_core.composition import steps
from alignment_core.composition.branches import branch, sharing
from alignment_core.composition.graph import BranchFailed, StageSpec, composing, failure, submit
from alignment_core.errors import NumericError, Stopped
from alignment_core.recipes import parse_recipe
from alignment_core.stages.variants import FailedVariant, Variant, VariantsConfig, table
from alignment_core.stages.variants import run as rank
from tests.align import Align
from tests.tracking.watched import result

DIVERGES = NumericError("sft: the gradient is not finite at step 1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    journal: Any = SimpleNamespace(stage=lambda *_, **__: None)
    monkeypatch.setattr(stage_tasks, "get_run_logger", lambda: SimpleNamespace(error=lambda *_: None))
    none: Any = None
    return Run(store=none, host=none, resources=none, seed=0, journal=journal)


def step(
    run: Run, label: str, error: Exception | None = None, needed: tuple[SubmittedStage, ...] = (), may_fail: bool = True
) -> SubmittedStage:
    """A finished stage: with its own error, or because a stage that it needs failed (``needed``), or successful."""
    future: Any = PrefectConcurrentFuture(uuid4(), Future())
    blocked = any(stage.cause() for stage in needed)
    state: Any = Failed(data=error) if error else Pending(name="NotReady") if blocked else Completed()
    future._final_state = state
    if error or blocked:
        future.wrapped_future.set_exception(error or RuntimeError("could not begin"))
    else:
        future.wrapped_future.set_result(result(label).model_dump(mode="json"))
    monkeyed = SimpleNamespace(
        task_run_id=future.task_run_id, state=state, result=future.wrapped_future.result, future=future
    )
    submitted = SubmittedStage(label, monkeyed, run, needed=needed, may_fail=may_fail)  # type: ignore[arg-type]
    run.steps.append(submitted)
    return submitted


def test_the_result_of_a_stage_that_may_fail_raises_branch_failed_with_the_cause(run: Run) -> None:
    received: list[tuple[str, str]] = []
    run.listeners = (SimpleNamespace(failed=lambda label, sentence: received.append((label, sentence))),)  # type: ignore[assignment]
    broken = step(run, "a/sft", DIVERGES)
    evaluation = step(run, "a/evaluation", needed=(broken,))
    for stage in (broken, evaluation):
        with pytest.raises(BranchFailed, match="the gradient is not finite") as caught:
            stage.ended()
        assert caught.value.cause is DIVERGES
    assert run.announced == {"a/sft", "a/evaluation"}
    assert received == [("a/sft", f"failed; stages that do not need it continue: {DIVERGES}")], (
        "reported once, and only for this stage"
    )


def test_stopping_a_run_stops_its_branches(run: Run) -> None:
    with pytest.raises(Stopped):
        step(run, "a/sft", Stopped("sft: the run was stopped")).ended()


def test_stages_of_a_branch_may_fail_and_stages_common_to_all_may_not(tmp_path: Path) -> None:
    """Of the whole composition: nothing; of a branch: all but its common labels."""
    submitted: dict[str, bool] = {}

    class Composition:
        store: Any = None
        seed = 0
        training_data: dict[str, Any] = {}
        trust_remote_code = False

        def submit(self, spec: StageSpec) -> Any:
            submitted[spec.label] = spec.may_fail
            return SimpleNamespace(label=spec.label)

    config: Any = SimpleNamespace(model_dump_json=lambda: str(len(submitted)))
    with composing(Composition()), sharing(frozenset({"data"})):
        submit("sft", "start", config, {})
        with branch("a"):
            submit("dataset", "data", config, {})
            submit("sft", "sft", config, {})
    assert submitted == {"start": False, "data": False, "a/sft": True}


def test_a_planned_stage_has_not_failed(tmp_path: Path) -> None:
    recipe = {"method": "sft", "name": "s", "model": {"scratch": {}}, "sft": {"data": {"task": "first", "rows": 8}}}
    planned = plan(parse_recipe(recipe), open_store(str(tmp_path / "store")))
    assert failure(planned.stages) is None


def test_a_variant_whose_metric_is_not_finite_failed_and_others_are_ranked(tmp_path: Path) -> None:
    """A learning rate that diverges in the last step gives held-out metrics of NaN, which are null in results and text in
    records."""

    def measured(**metrics: Any) -> Any:
        return SimpleNamespace(result=lambda: SimpleNamespace(metrics=metrics))

    submitted: list[StageSpec] = []
    whole: Any = SimpleNamespace(submit=submitted.append)
    fields = {name: {"lr": number} for number, name in enumerate("abcd")}
    measuring = {
        "a": measured(test_loss=None),
        "b": measured(test_loss=1.0, loss=float("inf")),
        "c": measured(test_loss=2.0),
        "d": measured(test_loss="NaN", best="text"),
    }
    with composing(whole):
        steps.variants("variants", "test_loss", fields, measuring)
        with pytest.raises(NumericError, match="'test_loss' is not finite for any variant"):
            steps.variants("variants", "test_loss", fields, {"a": measuring["a"]})
    config: Any = submitted[0].config
    assert [(variant.name, variant.metrics) for variant in config.variants] == [
        ("b", {"test_loss": 1.0}),
        ("c", {"test_loss": 2.0}),
    ]
    assert [(variant.name, variant.reason) for variant in config.failed] == [
        ("a", "test_loss is not finite"),
        ("d", "test_loss is not finite"),
    ]
    assert list(submitted[0].inputs) == ["b", "c"]


def test_failed_variants_are_last_in_the_table_with_their_errors(tmp_path: Path) -> None:
    config = VariantsConfig(
        metric="test_loss",
        lower_is_better=True,
        variants=(
            Variant(name="lr=0.001", fields={"lr": 0.001}, metrics={"test_loss": 2.0}),
            Variant(name="lr=0.01", fields={"lr": 0.01}, metrics={"test_loss": 1.0}),
        ),
        failed=(FailedVariant(name="lr=1e+30", fields={"lr": 1e30}, reason="not finite\nat step 1"),),
    )

    class Context:
        output = tmp_path

    ranking = rank(Context(), config)  # type: ignore[arg-type]
    assert ranking["best"] == "lr=0.01"
    head, rows = table("test_loss", ranking["variants"])
    assert (head[0], head[-1]) == ("lr", "failed")
    assert [(row[0], row[-1]) for row in rows] == [("0.01", ""), ("0.001", ""), ("1e+30", "not finite at step 1")]
    assert "| 1e+30 | — | not finite at step 1 |" in (tmp_path / "section.md").read_text()


STEPS = {"max_steps": 3, "batch_size": 8, "lr_scheduler_type": "constant"}
RECIPE: dict[str, Any] = {
    "method": "sweep",
    "name": "rates",
    "model": {"scratch": {"hidden_size": 64, "num_attention_heads": 2}},
    "base": {
        "method": "sft",
        "sft": {"data": {"task": "first", "rows": 40, "test_rows": 8}, "training": STEPS},
    },
    "sweep": {"sft.training.learning_rate": [1e30, 1e-3, 1e-4]},
    "resources": {"trainers": 1},
}
COMPARISON: dict[str, Any] = {
    "method": "comparison",
    "name": "compared",
    "result": "diverges",
    "model": {"scratch": {"hidden_size": 64, "num_attention_heads": 2}},
    "branches": {
        "sound": {"method": "dpo", "dpo": {"data": {"task": "first", "rows": 40}, "training": STEPS}},
        "diverges": {
            "method": "dpo",
            "dpo": {"data": {"task": "first", "rows": 40}, "training": {**STEPS, "learning_rate": 1e30}},
        },
    },
    "evaluation": {
        "prompts": {"task": "first", "split": "test", "rows": 8},
        "generation": {"num_generations": 1, "max_completion_length": 4},
        "verifier": "task",
    },
    "resources": {"trainers": 1, "engines": 1, "kv_cache_mib": 16},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_the_variants_of_a_sweep_that_do_not_diverge_are_ranked_and_cached(align: Align, tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(RECIPE))
    outcome = align(tmp_path / "home", "run", str(file), expect=PARTLY_FAILED)
    assert outcome["status"] == "partly failed"
    assert [*outcome["failed"]] == ["learning_rate=1e+30/sft"]
    assert "not finite" in outcome["failed"]["learning_rate=1e+30/sft"]
    rows = outcome["metrics"]["variants"]
    losses = [row["metrics"]["test_loss"] for row in rows[:2]]
    assert losses == sorted(losses)
    assert (rows[2]["name"], rows[2]["metrics"]) == ("learning_rate=1e+30", {})
    report = Path(outcome["report"]).read_text()
    assert "## Failed" in report
    assert "## Variants, best first" in report
    again = align(tmp_path / "home", "check", str(file))
    left = [stage["stage"] for stage in again["stages"] if stage["state"] != "cached"]
    assert left == ["learning_rate=1e+30/sft", "variants"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_the_branches_of_a_comparison_that_do_not_diverge_are_compared(align: Align, tmp_path: Path) -> None:
    file = tmp_path / "compared.json"
    branches = {name: {**branch, "evaluation": "ours"} for name, branch in COMPARISON["branches"].items()}
    file.write_text(json.dumps({**COMPARISON, "branches": branches}))
    outcome = align(tmp_path / "home", "run", str(file), expect=PARTLY_FAILED)
    assert [*outcome["failed"]] == ["diverges/dpo"]
    assert [*outcome["metrics"]["policies"]] == ["start", "sound"]
    assert [*outcome["metrics"]["comparisons"]] == ["sound"], "the branch that failed has no table of its own"
    assert "policy" not in outcome["outputs"], "that of the branch that failed would be the run's"
