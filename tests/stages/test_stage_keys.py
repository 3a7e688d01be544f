"""Stage keys: what changes them, what does not, what they cost, and how a changed key is explained."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import alignment_core.stages
from alignment_core.artifacts import Provenance, Reference
from alignment_core.data.pin import pin
from alignment_core.recipes import DataConfig
from alignment_core.source_code import package_source, reachable
from alignment_core.stages.base import Stage, StageCall, load_stage
from alignment_core.stages.key import (
    code_digest,
    key_parts,
    stage_key,
    stage_seed,
)
from alignment_core.stages.reasons import changes, in_words, why_it_runs

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "vllm", "ray", "deepspeed"]
HELPERS = {
    "base",
    "cost",
    "course",
    "key",
    "machine_queue",
    "machines",
    "pace",
    "runner",
    "report",
    "reasons",
    "restarts",
    "reward_sources",
    "training_loop",
    "turns",
    "best",
    "stopping",
    "stopwatch",
}
MODULES = sorted(module.name for module in pkgutil.iter_modules(alignment_core.stages.__path__))


def reference(kind: str, digit: str) -> Reference:
    return Reference(kind, digit * 64)


def call(**changed: Any) -> StageCall:
    fields = {
        "stage": "sft",
        "label": "sft",
        "config": {"training": {"learning_rate": 1e-4, "batch_size": 8}},
        "inputs": {"model": reference("model", "1"), "data": reference("dataset", "2")},
        "seed": 3,
    }
    return StageCall.model_validate(fields | changed)


def python(code: str, **environment: str) -> Any:
    """What ``code``, run by a fresh interpreter, prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ---------------------------------------------------------------- the same in every process


def test_every_process_computes_the_same_key():
    code = (
        "import json; from alignment_core.stages.base import StageCall; from alignment_core.stages.key import stage_key\n"
        f"print(json.dumps(stage_key(StageCall.model_validate_json({call().model_dump_json()!r}))))"
    )
    keys = {python(code, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert keys == {stage_key(call())}


def test_the_order_of_fields_and_inputs_and_the_spelling_of_defaults_do_not_matter():
    shuffled = call(
        config={"trust_remote_code": False, "training": {"batch_size": 8.0, "learning_rate": 1e-4, "max_steps": None}},
        inputs=dict(reversed(call().inputs.items())),
    )
    assert stage_key(shuffled) == stage_key(call())


def test_the_label_is_not_part_of_the_key():
    assert stage_key(call(label="round-7/sft")) == stage_key(call())


def test_a_key_is_made_of_meaning_alone_without_resources_or_paths():
    assert sorted(key_parts(call())) == ["code", "config", "inputs", "seed", "stage", "version"]
    assert "resources" not in StageCall.model_fields


@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"training": {"learning_rate": 2e-4, "batch_size": 8}}},
        {"inputs": {"model": reference("model", "9"), "data": reference("dataset", "2")}},
        {"inputs": {"model": reference("model", "2"), "data": reference("dataset", "1")}},
        {"inputs": {"model": reference("model", "1")}},
        {"seed": 4},
        {"stream": "round-2"},
        {"stage": "reward_model"},
    ],
    ids=["config", "input", "inputs swapped", "input missing", "seed", "stream", "stage"],
)
def test_one_change_gives_another_key(changed):
    assert stage_key(call(**changed)) != stage_key(call())


# ---------------------------------------------------------------- seeds


def test_what_differs_in_settings_inputs_or_label_shares_its_noise():
    others = [
        call(config={"training": {"learning_rate": 2e-4, "batch_size": 8}}),
        call(inputs={"model": reference("model", "9"), "data": reference("dataset", "8")}),
        call(label="elsewhere", rerun="again"),
    ]
    assert {stage_seed(one) for one in others} == {stage_seed(call())}


def test_another_recipe_seed_another_stage_and_another_stream_have_noise_of_their_own():
    others = [call(), call(seed=4), call(stage="reward_model"), call(stream="round-1"), call(stream="round-2")]
    assert len({stage_seed(one) for one in others}) == len(others)


def test_a_comment_in_a_reward_file_changes_neither_key_nor_seed(tmp_path):
    def of(source: str) -> StageCall:
        (tmp_path / "reward.py").write_text(source)
        config = {"verifier": f"{tmp_path / 'reward.py'}:score"}
        return call(stage="score", config=config, inputs={"rollouts": reference("rollouts", "3")})

    plain = of("def score(prompt, completion, label):\n    return float(completion == label)\n")
    before = stage_key(plain), stage_seed(plain)
    source = '"""Scores."""\ndef score(prompt,\n  completion, label):  # exact\n    "Exact."\n'
    source += "    return float(completion == label)"
    said = of(source)
    assert (stage_key(said), stage_seed(said)) == before
    other = of("def score(prompt, completion, label):\n    return float(completion != label)\n")
    assert stage_key(other) != before[0]
    assert stage_seed(other) == before[1]


# ---------------------------------------------------------------- data by content


def dataset_call(path: Path, **options: Any) -> StageCall:
    data = DataConfig.model_validate({"sources": [{"path": str(path), **options}]})
    config = {
        "data": data.model_dump(mode="json"),
        "sources": [pin(source).model_dump(mode="json") for source in data.sources],
        "purpose": "sft",
    }
    return call(stage="dataset", config=config, inputs={"tokenizer": reference("model", "1")})


@pytest.fixture
def file(tmp_path: Path):
    def write(folder: str, text: str) -> Path:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(text)
        return tmp_path / folder / "rows.jsonl"

    return write


def test_the_same_file_at_two_paths_is_the_same_data(file):
    here, there = (file(folder, '{"prompt": "a", "completion": "b"}\n') for folder in ("here", "there"))
    assert stage_key(dataset_call(here)) == stage_key(dataset_call(there))
    assert str(here.parent) not in json.dumps(key_parts(dataset_call(here)))


def test_another_content_or_another_way_to_read_it_is_other_data(file):
    before, after = file("before", '{"prompt": "a", "completion": "b"}\n'), file("after", '{"text": "a"}\n')
    keys = {stage_key(one) for one in (dataset_call(before), dataset_call(after), dataset_call(before, rows=1))}
    assert len(keys) == 3


# ---------------------------------------------------------------- code


def reached(stage: str) -> set[str]:
    return {
        str(path.relative_to(ROOT)) for path, _ in reachable(f"alignment_core.stages.{stage}", package_source).values()
    }


@pytest.mark.parametrize(
    ("stage", "files"),
    [
        ("sft", {"training/methods/sft.py", "training/trainer.py", "losses/logprobs.py", "canonical.py"}),
        ("dpo", {"training/methods/dpo.py", "training/methods/pairs.py", "losses/preference.py"}),
        ("generate", {"rollout/weights.py", "rollout/engine.py", "rollout/records.py", "models/saving.py"}),
        (
            "score",
            {"evaluation/verifiers.py", "data/tasks.py", "evaluation/math_answers.py", "evaluation/sandboxed.py"},
        ),
        ("rl", {"evaluation/sandboxed.py", "rollout/endpoint.py"}),
        ("dataset", {"data/build.py", "data/formats.py", "data/template.py"}),
        ("select_pairs", {"rollout/selection.py"}),
        ("evaluate", {"evaluation/statistics.py"}),
    ],
)
def test_the_code_of_a_stage_follows_imports_inside_functions_and_names_in_strings(stage, files):
    assert {f"alignment_core/{name}" for name in files} <= reached(stage)


def test_a_stage_does_not_depend_on_flows_or_on_other_stages():
    for stage in set(MODULES) - HELPERS:
        files = reached(stage)
        assert all(name.startswith("alignment_core/") for name in files)
        assert {name for name in files if name.startswith("alignment_core/host/")} == set()
    assert not {"alignment_core/training/methods/dpo.py", "alignment_core/stages/dpo.py"} & reached("sft")


def test_an_edit_of_a_reachable_module_changes_the_code_digest_and_of_another_does_not(tmp_path):
    """On a copy of the package, in fresh interpreters."""
    import shutil

    shutil.copytree(ROOT / "alignment_core", tmp_path / "alignment_core", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        f"import json, sys; sys.path.insert(0, {str(tmp_path)!r}); from alignment_core.stages import key\n"
        f"assert key.__file__.startswith({str(tmp_path)!r})\n"
        "print(json.dumps([key.code_digest(f'alignment_core.stages.{name}') for name in ('sft', 'dpo')]))"
    )
    before = python(code)
    assert before == [code_digest(f"alignment_core.stages.{name}") for name in ("sft", "dpo")]
    module = tmp_path / "alignment_core" / "training" / "methods" / "dpo.py"
    module.write_text(f'"""Another docstring."""\n\n\n# a comment\n{module.read_text().partition(chr(10))[2]}')
    assert python(code) == before
    with module.open("a") as file:
        file.write("EDITED = True\n")
    sft, dpo = python(code)
    assert sft == before[0]
    assert dpo != before[1]


def test_many_threads_may_ask_for_keys_while_garbage_is_collected():
    # Finalisers that run in the middle of a parse let another thread into Python 3.11's parser, which then fails.
    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)

    def ask(_: int) -> str:
        for _ in range(2):
            code_digest.cache_clear()
            package_source.cache_clear()
            for _ in range(20):
                Garbage()
            key = stage_key(call())
        return key

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(4))) == {stage_key(call())}


def test_a_source_that_changes_during_a_run_makes_no_results(tmp_path):
    """On a copy of the package: nobody could say which version of a module made them."""
    import shutil

    shutil.copytree(ROOT / "alignment_core", tmp_path / "alignment_core", ignore=shutil.ignore_patterns("__pycache__"))
    losses = tmp_path / "alignment_core" / "losses" / "preference.py"
    code = (
        f"import json, pathlib, sys; sys.path.insert(0, {str(tmp_path)!r}); from alignment_core.stages import key\n"
        "key.check_source()\n"
        f"with pathlib.Path({str(losses)!r}).open('a') as file: file.write('# edited')\n"
        "try: key.check_source()\n"
        "except Exception as error: print(json.dumps([type(error).__name__, str(error)]))"
    )
    kind, message = python(code)
    assert kind == "EnvironmentFault"
    assert "alignment_core/losses/preference.py changed since this run started" in message


# ---------------------------------------------------------------- why it runs


def record(parts: dict[str, Any], label: str = "sft", finished_at: str = "2026-01-01T00:00:00+00:00") -> Provenance:
    return Provenance(
        key="a" * 64,
        stage="sft",
        label=label,
        key_parts=parts,
        finished_at=finished_at,
        output=reference("model", "f"),
    )


def test_changes_are_told_by_path():
    before = {"a": {"x": 1, "gone": 2}, "b": [1, 2], "c": [1]}
    after = {"a": {"x": 3, "new": 2}, "b": [1, 5], "c": [1, 2]}
    assert changes(before, after) == ["a.gone removed", "a.new added", "a.x: 1 → 3", "b.1: 2 → 5", "c: [1] → [1, 2]"]
    assert changes(before, before) == []


def test_a_reference_and_a_digest_are_shown_short():
    assert changes({"model": f"model@sha256:{'1' * 64}"}, {"model": f"model@sha256:{'2' * 64}"}) == [
        "model: model@11111111 → model@22222222"
    ]
    assert changes({"code": "a" * 64}, {"code": "b" * 64}) == ["code: aaaaaaaa… → bbbbbbbb…"]


def test_the_first_run_says_so():
    other = record({"stage": "dpo"})
    assert why_it_runs(key_parts(call()), [other]) == "first run of this stage in this store"


def test_a_change_is_told_against_the_nearest_earlier_run():
    near = record(key_parts(call(seed=9)), "near")
    far = record(key_parts(call(seed=9, config={"training": {"batch_size": 1}})), "far", "2026-02-01T00:00:00+00:00")
    assert why_it_runs(key_parts(call()), [far, near]) == "changed since near: seed: 9 → 3"


def test_among_equally_near_runs_the_latest_is_told():
    old, new = record(key_parts(call(seed=1)), "old"), record(key_parts(call(seed=2)), "new", "2026-03-01T00:00:00Z")
    assert why_it_runs(key_parts(call()), [old, new]) == "changed since new: seed: 2 → 3"


def test_many_changes_are_counted():
    earlier = record(key_parts(call(seed=9, config={"training": {"bf16": True, "max_steps": 1}})))
    sentence = why_it_runs(key_parts(call()), [earlier], "sft")
    # batch_size, bf16 and learning_rate are told; max_steps and the seed are counted
    assert sentence == (
        "changed since sft: sft.training.batch_size: 32 → 8; sft.training.bf16: True → False; "
        "sft.training.learning_rate: 1e-05 → 0.0001; and 2 more"
    )


def test_what_changed_is_told_in_words_of_the_recipe():
    changed = {
        "sft/data": ["config.data.max_length: 1 → 2", "config.sources.0.rows: 1 → 2"],
        "round-2/generate": [
            "config.generation.temperature: 1 → 2",
            "config.prompts: 64 → 128",
            "inputs.policy: a → b",
        ],
        "round-2/score": ["config.verifier.code: a → b"],
        "sft/evaluation": ["config.resamples: 1 → 2"],
        "rl": ["config.kl added", "code: a → b", "config.trust_remote_code: False → True"],
        "mine": ["config.x: 1 → 2"],
    }
    assert {label: in_words(lines, label) for label, lines in changed.items()} == {
        "sft/data": ["sft.data.max_length: 1 → 2", "sft.data.sources.0.rows: 1 → 2"],
        "round-2/generate": [
            "iterative_dpo.generation.temperature: 1 → 2",
            "iterative_dpo.prompts_per_round: 64 → 128",
            "input policy: a → b",
        ],
        "round-2/score": ["evaluation.verifier (its source): a → b"],
        "sft/evaluation": ["evaluation.resamples: 1 → 2"],
        "rl": ["rl.kl added", "the code of alignment_core: a → b", "model.trust_remote_code: False → True"],
        "mine": ["config.x: 1 → 2"],
    }


def data_record(label: str, purpose: str, finished_at: str = "2026-01-01T00:00:00+00:00", **more: Any) -> Provenance:
    parts = {"stage": "dataset", "config": {"purpose": purpose}, "stream": purpose, **more}
    return record(parts, label, finished_at)


def test_a_first_data_set_of_pairs_is_not_compared_with_demonstrations():
    first = {"stage": "dataset", "config": {"purpose": "preference"}, "stream": "preference"}
    assert why_it_runs(first, [data_record("sft/data", "sft")], "dpo/data") == "first run of this stage in this store"
    pairs = data_record("reward-model/data", "preference", seed=1)
    assert why_it_runs(first, [pairs], "dpo/data").startswith("changed since reward-model/data")


def test_the_same_label_goes_first_and_then_other_rounds():
    parts = {"stage": "dpo", "seed": 1, "stream": "round-2"}
    near, same = record({**parts, "seed": 2}, "round-1/dpo"), record({**parts, "seed": 2, "x": 1}, "round-2/dpo")
    other = record(parts | {"stream": ""}, "dpo")
    assert why_it_runs(parts, [near, same, other], "round-2/dpo").startswith("changed since round-2/dpo")
    assert why_it_runs(parts, [near, other], "round-2/dpo").startswith("changed since round-1/dpo")


def test_what_a_record_holds_and_what_is_computed_now_differ_in_nothing():
    section = {"prompts": {"task": "reverse", "rows": 8}, "rewards": [{"verifier": "task"}], "steps": 3}
    parts = key_parts(call(stage="rl", label="rl", config={"section": section}))
    assert changes(json.loads(json.dumps(parts)), parts) == []


def test_a_stage_with_an_equal_record_runs_because_its_artifact_is_gone():
    assert why_it_runs(key_parts(call()), [record(key_parts(call()))]) == "its artifact is pruned, gone or damaged"


# ---------------------------------------------------------------- light


@pytest.mark.parametrize("name", sorted(set(MODULES) - HELPERS))
def test_every_stage_module_defines_its_stage_by_its_own_name(name):
    stage = load_stage(name)
    assert isinstance(stage, Stage)
    assert stage.name == name


def test_stages_and_their_keys_need_no_machine_learning_package():
    stages = sorted(set(MODULES) - HELPERS)
    loaded = python(
        "import importlib, json, sys\nfrom alignment_core.stages.key import code_digest\n"
        f"for name in {MODULES}: importlib.import_module(f'alignment_core.stages.{{name}}')\n"
        f"for name in {stages}: code_digest(f'alignment_core.stages.{{name}}')\n"
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    assert loaded == []


@pytest.mark.parametrize("module", ["flows", "flows.cli"])
def test_the_flows_package_and_the_command_start_within_a_second_and_a_half(module):
    code = (
        f"import time; t = time.perf_counter(); import json, sys, {module}; t = time.perf_counter() - t\n"
        f"print(json.dumps([t, [name for name in {HEAVY} if name in sys.modules]]))"
    )
    seconds, loaded = zip(*(python(code) for _ in range(3)), strict=True)
    assert loaded == ([], [], [])
    assert min(seconds) <= 1.5


def test_a_run_of_the_command_loads_neither_the_forms_of_deployments_nor_pandas():
    loaded = python(
        "import json, sys\nfrom alignment_core.imports import hidden\n"
        "with hidden('pandas'): import flows.cli, flows.any_recipe\n"
        "print(json.dumps([name for name in ('pandas', 'flows.alignment', 'torch') if name in sys.modules]))\n"
        "import pandas"  # hidden no more
    )
    assert loaded == []


def test_a_guard_that_is_not_set_leaves_keys_and_seeds_as_they_were():
    guarded = {"training": {"learning_rate": 1e-4, "batch_size": 8, "max_loss": 9.0}}
    unset = {"training": {"learning_rate": 1e-4, "batch_size": 8, "max_loss": None}}
    assert "max_loss" not in key_parts(call())["config"]["training"]
    assert stage_key(call(config=unset)) == stage_key(call())
    assert stage_key(call(config=guarded)) != stage_key(call())
