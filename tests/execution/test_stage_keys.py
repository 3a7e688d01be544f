"""Keys and seeds of stages: changes that affect them, and changes that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment_core import source_code
from alignment_core.data.pin import pin
from alignment_core.errors import EnvironmentFault
from alignment_core.execution.base import StageCall
from alignment_core.execution.key import check_source, key_of, stage_seed
from alignment_core.recipes import DataConfig
from tests.stages.calls import call, python, reference


def test_every_process_computes_the_same_key():
    code = (
        "import json; from alignment_core.execution.base import StageCall; from alignment_core.execution.key import key_of\n"
        f"print(json.dumps(key_of(StageCall.model_validate_json({call().model_dump_json()!r})).value))"
    )
    keys = {python(code, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert keys == {key_of(call()).value}


def test_the_order_of_fields_and_inputs_and_the_spelling_of_defaults_do_not_matter():
    shuffled = call(
        config={"trust_remote_code": False, "training": {"batch_size": 8.0, "learning_rate": 1e-4, "max_steps": None}},
        inputs=dict(reversed(call().inputs.items())),
    )
    assert key_of(shuffled).value == key_of(call()).value


def test_the_label_is_not_part_of_the_key():
    assert key_of(call(label="round-7/sft")).value == key_of(call()).value


def test_a_key_is_made_of_meaning_alone_without_resources_or_paths():
    assert sorted(key_of(call()).parts) == ["code", "config", "inputs", "packages", "seed", "stage", "version"]
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
        {"trust_remote_code": True},
    ],
    ids=["config", "input", "inputs swapped", "input missing", "seed", "stream", "stage", "trust"],
)
def test_any_single_change_gives_another_key(changed):
    assert key_of(call(**changed)).value != key_of(call()).value


def test_options_of_a_package_matter_only_where_that_computes():
    trains, samples = call(), call(stage="generate", config={"generation": {}}, inputs={})
    vllm, deepspeed = {"vllm": {"max_num_batched_tokens": 64}}, {"deepspeed": {"zero_optimization": {}}}
    for stage, counts, others in ((trains, deepspeed, vllm), (samples, vllm, deepspeed)):
        plain = key_of(stage).value
        assert key_of(stage.model_copy(update={"passed": others})).value == plain
        assert key_of(stage.model_copy(update={"passed": {**others, **counts}})).value != plain


def test_code_of_models_that_is_trusted_matters_only_where_a_model_is_loaded():
    pairs = {"stage": "overlap", "config": {"field": "prompts"}, "inputs": {"held_out": reference("dataset", "2")}}
    assert key_of(call(**pairs, trust_remote_code=True)).value == key_of(call(**pairs)).value


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("math", "alignment_core.rewards.verifiers.math", "math-verify"),
        ("code", "alignment_core.rewards.sandbox.runner", None),
        ("task", "alignment_core.data.tasks", None),
    ],
)
def test_the_code_of_a_named_verifier_is_in_the_key_of_every_stage_that_uses_this_verifier(name, module, package):
    prompts = {"sources": [{"task": "first"}]}
    section = {"prompts": prompts, "rewards": [{"verifier": name}]}
    scored = call(stage="score", config={"verifier": name}, inputs={"rollouts": reference("rollouts", "3")})
    learnt = call(stage="rl", config={"section": section})
    for stage in (scored, learnt):
        parts = key_of(stage).parts
        assert module in parts["code"]
        assert package is None or package in parts["packages"]
    tools = {"name": "alignment_core.environments.tools:Tools", "options": {"tools": [], "verifier": name}}
    section = {"prompts": prompts, "rewards": [{"environment": True}], "environment": tools}
    answer = key_of(call(stage="rl", config={"section": section})).parts["config"]["environment"]["options"]["verifier"]
    if name != "task":  # which is a function of ours to them, and counts by its source
        assert module in answer["code"]
        assert package is None or package in answer["packages"]


def test_a_plugin_edited_after_a_key_was_computed_makes_no_results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_plugin.py").write_text("def loss(x): return x\n")
    assert source_code.digest_of_module("edited_plugin")
    check_source()
    (tmp_path / "edited_plugin.py").write_text("def loss(x): return 2 * x\n")
    try:
        with pytest.raises(EnvironmentFault, match=r"edited_plugin\.py changed since this run started"):
            check_source()
    finally:
        del source_code._READ[tmp_path / "edited_plugin.py"]
        source_code._source.cache_clear()


def test_a_guard_that_is_not_set_changes_neither_keys_nor_seeds():
    guarded = {"training": {"learning_rate": 1e-4, "batch_size": 8, "max_loss": 9.0}}
    unset = {"training": {"learning_rate": 1e-4, "batch_size": 8, "max_loss": None}}
    assert "max_loss" not in key_of(call()).parts["config"]["training"]
    assert key_of(call(config=unset)).value == key_of(call()).value
    assert key_of(call(config=guarded)).value != key_of(call()).value


# ---------------------------------------------------------------- seeds


def test_stages_that_differ_only_in_settings_inputs_or_label_share_a_seed():
    others = [
        call(config={"training": {"learning_rate": 2e-4, "batch_size": 8}}),
        call(inputs={"model": reference("model", "9"), "data": reference("dataset", "8")}),
        call(label="elsewhere", rerun="again"),
    ]
    assert {stage_seed(other) for other in others} == {stage_seed(call())}


def test_recipe_seed_stage_and_stream_each_change_the_seed():
    others = [call(), call(seed=4), call(stage="reward_model"), call(stream="round-1"), call(stream="round-2")]
    assert len({stage_seed(other) for other in others}) == len(others)


def test_a_comment_in_a_reward_file_changes_neither_key_nor_seed(tmp_path):
    def of(source: str) -> StageCall:
        (tmp_path / "reward.py").write_text(source)
        config = {"verifier": f"{tmp_path / 'reward.py'}:score"}
        return call(stage="score", config=config, inputs={"rollouts": reference("rollouts", "3")})

    plain = of("def score(prompt, completion, label):\n    return float(completion == label)\n")
    before = key_of(plain).value, stage_seed(plain)
    source = "# Scores.\ndef score(prompt,\n  completion, label):  # exact\n"
    source += "    return float(completion == label)"
    digest = of(source)
    assert (key_of(digest).value, stage_seed(digest)) == before
    other = of("def score(prompt, completion, label):\n    return float(completion != label)\n")
    assert key_of(other).value != before[0]
    assert stage_seed(other) == before[1]


# ---------------------------------------------------------------- data by content


def dataset_call(path: Path, **options: Any) -> StageCall:
    data = DataConfig.model_validate({"sources": [{"path": str(path), **options}]})
    config = {
        "data": data.model_dump(mode="json"),
        "sources": [pin(source).model_dump(mode="json") for source in data.sources],
        "kind": "demonstrations",
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
    assert key_of(dataset_call(here)).value == key_of(dataset_call(there)).value
    assert str(here.parent) not in json.dumps(key_of(dataset_call(here)).parts)


def test_other_content_or_another_way_to_read_rows_is_other_data(file):
    before, after = file("before", '{"prompt": "a", "completion": "b"}\n'), file("after", '{"text": "a"}\n')
    keys = {
        key_of(dataset).value for dataset in (dataset_call(before), dataset_call(after), dataset_call(before, rows=1))
    }
    assert len(keys) == 3
