"""The plan of a run: stages that would run, and cached ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from alignment.flows import preflight
from alignment.flows.cli import check as cli_check
from alignment.flows.planning import plan
from alignment_core.artifacts import ProvenanceDraft, Reference, Store, open_store
from alignment_core.artifacts.paths import blob_path, manifest_path, pruned_path
from alignment_core.artifacts.reference import MASTERS
from alignment_core.checks.report import Findings, check
from alignment_core.composition.plan import Plan, PlannedStage
from alignment_core.errors import DataError
from alignment_core.execution.base import StageCall, StageConfig
from alignment_core.execution.key import StageKey, key_of
from alignment_core.execution.runner import cached_result
from alignment_core.models.masters import name_masters
from alignment_core.recipes import GenerationConfig, parse_recipe
from alignment_core.stages.generate import GenerateConfig
from tests.align import align_here
from tests.checks.recipes import MODEL, look, rl, sft
from tests.processes import processes_of, wait_until

ROOT = Path(__file__).parents[2]


def test_a_plan_shows_cached_running_and_dependent_stages(store, rows, tmp_path):
    recipe = parse_recipe(sft(rows))
    before = plan(recipe, store)
    assert [(stage.label, stage.state) for stage in before.stages] == [
        ("model", "runs"),
        ("sft/data", "depends"),
        ("sft", "depends"),
    ]
    assert before.stages[2].waits_for() == ["model"]
    model = before.stages[0]
    call = StageCall(stage="base_model", label="model", config=model.config.model_dump(mode="json"), inputs={})
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    store.publish(
        tmp_path / "made", "model", ProvenanceDraft(key=key_of(call).value, stage="base_model", label="model")
    )
    after = plan(recipe, store)
    assert [stage.state for stage in after.stages] == ["cached", "runs", "depends"]
    assert after.stages[2].waits_for() == ["sft/data"]


def test_the_plan_has_the_evaluation_of_the_tagged_model_if_the_tag_exists(store, rows, tmp_path):
    prompts = {"path": str(rows), "columns": {"label": "completion"}}
    evaluation = {"prompts": prompts, "generation": {"max_completion_length": 8}, "verifier": "math"}
    promotion = {"gates": [{"metric": "accuracy", "min_gain": 0}]}
    recipe = parse_recipe({**sft(rows), "evaluation": evaluation, "promotion": promotion})
    assert not any("production" in stage.label for stage in plan(recipe, store).stages)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    store.tags.move("policy/production", store.publish(tmp_path / "made", "model"), None, "imported")
    planned = {stage.label: stage.state for stage in plan(recipe, store).stages}
    assert planned["production/evaluation/generate"] == planned["promotion/report"] == "depends"


def test_a_nightly_plan_leaves_open_the_rows_that_a_night_will_take(store, rows, tmp_path):
    pairs, prompts = tmp_path / "arrives.jsonl", {"path": str(rows), "columns": {"label": "completion"}}
    recipe = {
        "method": "nightly",
        "name": "nights",
        "model": MODEL,
        "dpo": {"data": str(pairs)},
        "evaluation": {"prompts": prompts, "generation": {"max_completion_length": 62}, "verifier": "math"},
        "promotion": {"gates": [{"metric": "accuracy", "min_gain": 0}]},
    }
    planned = plan(parse_recipe(recipe), store)
    (arriving,) = [stage for stage in planned.stages if stage.label == "rows"]
    assert arriving.waits_for() == ["model", "the night's rows"]
    assert any(
        "candidate/evaluation/generate: the longest prompt" in problem for problem in look(store, recipe).problems
    )


def test_cached_data_sets_are_not_checked(store, rows):
    planned = plan(parse_recipe(sft(rows)), store)
    rows.unlink()
    cached = [PlannedStage(stage.label, stage.stage, stage.config, stage.inputs, "cached") for stage in planned.stages]
    assert check(Plan(store, 0, cached), parse_recipe(sft(rows.parent)).resources) == Findings()


def test_a_refused_run_prints_the_sentence_and_imports_nothing_heavy(rows, tmp_path):
    rows.write_text("{broken\n")
    (tmp_path / "recipe.json").write_text(json.dumps(sft(rows)))  # JSON is YAML
    code = (
        "import sys\nfrom alignment.flows.cli.main import main\n"
        f"sys.argv = ['align', 'run', {str(tmp_path / 'recipe.json')!r}]\n"
        "try: main()\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm', 'transformers', 'prefect') if name in sys.modules])"
    )
    home = tmp_path / "home"
    environment = os.environ | {"ALIGN_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "2 []\n"
    assert "rows.jsonl:1: is not valid JSON" in done.stderr
    assert not list((home / "logs").glob("starting-*")), "no host"
    assert not (home / "runs").exists()


def test_align_check_lists_stages_and_data(rows, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(sft(rows)))
    done = align_here(tmp_path / "home", "check", str(tmp_path / "recipe.json"), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["status"]) == (0, "checked")
    assert [stage["state"] for stage in report["stages"]] == ["runs", "depends", "depends"]
    assert [(data["label"], data["read"]) for data in report["data"]] == [("sft/data", 100)]


def test_align_check_explains_why_a_policy_cannot_be_compared_with_the_tagged_model(
    rows, tmp_path, monkeypatch, capsys
):
    prompts = {"path": str(rows), "columns": {"label": "completion"}}
    gates = [{"metric": "kl", "max": 1}, {"metric": "length", "min_gain": 0}]
    content = {**sft(rows), "evaluation": {"prompts": prompts}, "promotion": {"gates": gates}}
    content["store"] = str(tmp_path / "store")
    store = open_store(content["store"])

    def publish(name: str, draft: ProvenanceDraft | None = None) -> Reference:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text("words" if draft is None else "bytes")
        return store.publish(tmp_path / name, "dataset" if name == "sft/data" else "model", draft)

    calls: dict[str, StageCall] = {}

    def looked_up(store: Store, call: StageCall, key: StageKey, use: bool) -> Any:
        calls[call.label] = call
        return cached_result(store, call, key, use)

    monkeypatch.setattr("alignment_core.composition.plan.cached_result", looked_up)
    store.tags.move("policy/production", publish("production"), None, "imported")
    for label in ("model", "sft/data", "sft"):  # stand-ins, as real ones would have to be trained
        planned = plan(parse_recipe(content), store)
        assert planned.not_promoted is None, "unknown before the policy exists"
        publish(label, ProvenanceDraft(key=key_of(calls[label]).value, stage=calls[label].stage, label=label))

    (tmp_path / "recipe.json").write_text(json.dumps(content))
    monkeypatch.setattr(
        "alignment_core.checks.report.check", lambda *_: Findings()
    )  # the stand-ins have no weights to check
    for as_json in (False, True):
        cli_check.check(tmp_path / "recipe.json", [], [], None, as_json)
    text, as_dict = capsys.readouterr().out.rsplit("\n", 2)[:2]
    why = "policy/production points to model@"
    assert f"cannot be promoted: {why}" in text
    assert "it cannot be compared; align promote moves the tag by hand" in text
    assert json.loads(as_dict)["not_promoted"].startswith(why)


@pytest.mark.parametrize(
    ("states", "starts", "on_gpus"),
    [
        ({"base_model": "cached", "sft": "cached"}, None, None),  # no host and no Ray
        ({"base_model": "cached", "sft": "runs", "generate": "cached"}, ["trainers"], ["trainers"]),
        (
            {"base_model": "runs", "sft": "depends", "generate": "depends"},
            ["trainers", "engines"],
            ["trainers", "engines"],
        ),
        ({"generate": "runs", "dpo": "depends"}, ["engines", "trainers"], ["trainers", "engines"]),
        ({"rl": "runs"}, ["engines", "trainers"], ["trainers", "engines"]),
        ({"base_model": "runs", "generate": "depends", "score": "depends"}, ["engines"], ["trainers", "engines"]),
        ({"merge": "runs"}, [], ["trainers"]),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_host_starts_before_the_run_if_a_stage_is_certain_to_run_with_the_actors_that_stages_may_use(
    store, rows, monkeypatch, states, starts, on_gpus, device
):
    """On a CPU in the order of their first use; on GPUs trainers come first in any case, as on clusters."""
    started = []

    class Starting:
        def __init__(self, *_, prewarm, **__):
            self.prewarm = prewarm

        def start(self):
            started.append([*self.prewarm])

    monkeypatch.setattr(preflight, "Host", Starting)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    generate = GenerateConfig(generation=GenerationConfig())
    configs = {name: generate if name in ("generate", "rl") else StageConfig() for name in states}
    planned = Plan(store, 0, [PlannedStage(name, name, configs[name], {}, state) for name, state in states.items()])
    expected = on_gpus if device == "cuda" else starts
    recipe = parse_recipe({**sft(rows), "resources": {"device": device}})
    assert (preflight.early_host(recipe, planned) is None) == (expected is None)
    assert started == [groups for groups in [expected] if groups is not None]


TOO_LONG = json.dumps({"prompt": "!" * 100, "completion": "yes"}) + "\n"
"""A row that only the tokenizer shows to be longer than the model's context of 64 tokens."""


@pytest.mark.parametrize(
    ("row", "device", "ends", "sentence", "expected"),
    [
        ("", "cpu", False, None, ["started"]),
        ("{broken\n", "cpu", False, "is not valid JSON", []),
        (TOO_LONG, "cpu", False, "the model takes at most 64", ["started", "abandoned"]),
        (TOO_LONG, "cpu", True, None, ["started"]),  # what a reader that is killed would have said, the stage says
        ("", "cuda", False, None, ["started"]),
        (TOO_LONG, "cuda", False, "the model takes at most 64", []),
    ],
    ids=["valid", "malformed", "too long", "no reader", "valid, on GPUs", "too long, on GPUs"],
)
def test_the_host_starts_once_the_rows_are_parsed_and_ends_if_a_later_check_fails(
    store, rows, monkeypatch, row, device, ends, sentence, expected
):
    """On GPUs it starts after all checks."""
    calls = []

    class Recording:
        def __init__(self, *_, **__): ...

        def start(self):
            calls.append("started")

        def abandon(self):
            calls.append("abandoned")

    monkeypatch.setattr(preflight, "Host", Recording)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ends:
        monkeypatch.setattr("alignment_core.checks.rows.MAIN", "import sys; sys.stdin.read()")
    with rows.open("a") as file:
        file.write(row)
    recipe = parse_recipe({**sft(rows), "resources": {"device": device}})
    if sentence is not None:
        with pytest.raises(DataError, match=sentence):
            preflight.check_and_start(recipe, store, None)
    else:
        planned, host = preflight.check_and_start(recipe, store, None)
        assert [stage.label for stage in planned.stages] == ["model", "sft/data", "sft"]
        assert isinstance(host, Recording)
    assert calls == expected


@pytest.mark.slow
def test_nothing_is_left_of_a_host_that_started_before_a_check_failed(rows, tmp_path):
    with rows.open("a") as file:
        file.write(TOO_LONG)
    (tmp_path / "recipe.json").write_text(json.dumps({**sft(rows), "resources": {"device": "cpu"}}))
    home = tmp_path / "home"
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", str(tmp_path / "recipe.json")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "ALIGN_HOME": str(home)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "the model takes at most 64" in done.stderr
    assert wait_until(lambda: not processes_of(home), 60), processes_of(home)
    assert not list((home / "logs").glob("starting-*"))
    assert not (home / "runs").exists()


@pytest.mark.parametrize("lost", ["pruned", "manifest", "blob", None])
def test_master_weights_that_the_first_training_would_miss_are_named_before_the_run(
    lost, store, rows, tmp_path, tiny_model
):
    policy, masters = tmp_path / "policy", tmp_path / "masters"
    shutil.copytree(tiny_model(), policy)
    masters.mkdir()
    (masters / "portable-00000.safetensors").write_text("weights")
    name_masters(policy, masters)
    outputs = {"model": (policy, "model"), MASTERS: (masters, MASTERS)}
    trained = store.publish_outputs(outputs, ProvenanceDraft(key="a" * 64, stage="sft", label="sft"))
    (entry,) = store.manifest(trained[MASTERS]).files
    store.tags.move("policy/mine", trained["model"], None, "by hand")
    recipe = {**sft(rows), "model": {"name": "policy/mine"}}
    if lost == "pruned":
        store.backend.put(pruned_path(trained[MASTERS].digest), b"pruned")
    elif lost:
        paths = {"manifest": manifest_path(trained[MASTERS].digest), "blob": blob_path(entry.sha256)}
        Path(store.uri, paths[lost]).unlink()
    recipe["sft"]["training"] = {"bf16": True}
    problems = look(store, recipe).problems
    if lost is None:
        assert problems == []
        return
    (problem,) = problems
    assert problem.startswith(
        f"sft: {trained['model'].short} was trained in bf16, and its fp32 master weights are not whole"
    )
    assert f"`align artifacts copy {trained[MASTERS]} --from" in problem
    of_rl = {**rl(rows, {"verifier": "math"}), "model": {"name": "policy/mine"}}
    of_rl["rl"]["training"] = {"bf16": True}
    assert look(store, of_rl).problems == [problem.replace("sft:", "rl:", 1)]
    for settings in ({"bf16": True, "keep_master_weights": False}, {}):
        recipe["sft"]["training"] = settings
        assert look(store, recipe).problems == []
