"""The written recipe: it loads, passes the checks, and its text equals its content."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.checks import traps
from alignment_core.checks.report import check
from alignment_core.errors import UserError
from alignment_core.init.base import loaded
from alignment_core.init.machine import Machine
from alignment_core.init.text import Commented, plain, written
from alignment_core.recipes import load_recipe
from tests.init.conftest import CPU, GPU, Draft, problems
from tests.init.rows_of_kinds import ROWS, jsonl

DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data (GSM8K, HH-RLHF, MT-Bench) is not here")


@pytest.mark.parametrize("name", ROWS)
def test_the_recipe_of_any_rows_loads_and_passes_its_checks(
    name: str, draft: Draft, store: Store, tmp_path: Path, tiny_model: Any
) -> None:
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS[name][2]), model=str(tiny_model()))
    assert yaml.safe_load(result.text) == result.recipe
    assert load_recipe(tmp_path / "recipe.yaml").method == ROWS[name][0]
    assert problems(tmp_path / "recipe.yaml", store) == []
    assert result.profile.lengths.problem is None


@pytest.mark.parametrize("method", sorted(loaded()))
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["CPU", "GPU"])
def test_every_method_that_init_supports_can_be_requested(
    method: str, machine: Machine, draft: Draft, store: Store, tmp_path: Path
) -> None:
    named = {"kto": "labels", "dpo": "HH", "reward-model": "preferences", "process-reward-model": "steps"}
    name = named.get(method, "text" if method == "continued-pretraining" else "worked solutions")
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS[name][2]), machine, method=method)
    assert result.method == method
    assert problems(tmp_path / "recipe.yaml", store) == []


@pytest.mark.parametrize("method", ["iterative-dpo", "rejection-sampling", "kto", "sft"])
def test_methods_that_can_train_on_pairs_accept_them(method: str, draft: Draft, store: Store, tmp_path: Path) -> None:
    draft(jsonl(tmp_path / "rows.jsonl", ROWS["preferences"][2]), method=method)
    assert problems(tmp_path / "recipe.yaml", store) == []


KINDS = {
    "conditional-sft": ["prompt and label"],
    "continued-pretraining": ["text"],
    "dpo": ["preferences"],
    "iterative-dpo": ["preferences", "prompt and label"],
    "kto": ["labels", "preferences"],
    "generate": ["prompts alone"],
    "process-reward-model": ["steps"],
    "rejection-sampling": ["preferences", "prompt and label"],
    "reward-model": ["preferences"],
    "rl": ["prompt and label"],
}
"""The rows for each method; of others, those with and without answers that can be verified."""


@pytest.mark.parametrize("count", [40, 1500])
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (method, kind)
        for method in sorted(loaded())
        for kind in KINDS.get(method, ["prompt and completion", "solution and answer"])
    ],
)
def test_recipes_for_pretrained_models_fall_into_no_trap(
    method: str,
    kind: str,
    machine: Machine,
    count: int,
    draft: Draft,
    tiny_model: Any,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("alignment_core.doctor.machine.has_gpu", lambda: machine.gpus > 0)
    rows = (ROWS[kind][2] * math.ceil(count / 40))[:count]
    renumbered = [json.loads(json.dumps(row).replace(str(n % 40), str(n))) for n, row in enumerate(rows)]
    draft(jsonl(tmp_path / "rows.jsonl", renumbered), machine, method=method, model=str(tiny_model()))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert traps.warnings(recipe) == []
    assert check(plan(recipe, store), recipe.resources).warnings == []


def test_small_data_of_kto_make_batches_for_its_baseline_and_enough_steps(
    draft: Draft, tiny_model: Any, tmp_path: Path
) -> None:
    """TRL's documentation: 16 rows or more. 36 of 40 rows are 3 batches of 16 an epoch, and 10 epochs of them 30 steps."""
    rows = jsonl(tmp_path / "rows.jsonl", ROWS["labels"][2])
    training = draft(rows, model=str(tiny_model())).recipe["kto"]["training"]
    assert (training["batch_size"], training["num_train_epochs"]) == (16, 10)


def test_small_data_of_a_reward_model_make_small_batches_of_one_epoch(
    draft: Draft, tiny_model: Any, tmp_path: Path
) -> None:
    """Of 140 pairs 14 are held out; 126 are 32 batches of 4, and 16 of 8."""
    rows = [{"prompt": f"q {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(140)]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    training = draft(file, method="reward-model", model=str(tiny_model())).recipe["reward_model"]["training"]
    assert (training["batch_size"], training["num_train_epochs"]) == (4, 1)


def test_a_pretrained_model_takes_enough_steps_of_reinforcement_learning(
    draft: Draft, tiny_model: Any, tmp_path: Path
) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(60)])
    assert draft(rows, method="rl", model=str(tiny_model())).recipe["rl"]["steps"] == 100
    assert draft(rows, method="rl").recipe["rl"]["steps"] == 10, (
        "of a new model, whose learning rate is 200 times as high"
    )


@real
@pytest.mark.parametrize(
    ("path", "method", "wish"),
    [
        ("gsm8k", "sft", {}),
        ("gsm8k/train.jsonl", "rl", {"method": "grpo", "eval_data": str(DATA / "gsm8k" / "test.jsonl")}),
        ("hh-rlhf-harmless", "dpo", {}),
        ("hh-rlhf-harmless/test.jsonl", "reward-model", {"method": "reward-model"}),
        ("bench-prompts/mt_bench.jsonl", "generate", {}),
    ],
)
def test_real_rows_give_recipes_that_pass(
    path: str, method: str, wish: dict[str, str], draft: Draft, store: Store, tmp_path: Path
) -> None:
    result = draft(DATA / path, **wish)
    assert result.method == method
    assert problems(tmp_path / "recipe.yaml", store) == []


@pytest.mark.parametrize(
    ("method", "sentence"),
    [("ppo", "align init --from ppo"), ("rlhf", "--method grpo"), ("reinforce-baseline", "GRPO")],
)
def test_a_setting_that_is_no_method_is_refused_with_the_nearest_option(
    method: str, sentence: str, draft: Draft, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=sentence):
        draft(jsonl(tmp_path / "rows.jsonl", ROWS["prompt and label"][2]), method=method)


def test_the_text_has_comments_and_parses_to_the_same_recipe() -> None:
    content = {
        "a": Commented(1, "one"),
        "b": {"c": [Commented({"d": "x: y"}, "two")], "e": {"f": Commented([1, 2], "three")}},
        "g": {},
    }
    text = written(content, "A head.")
    assert text.splitlines()[:2] == ["# A head.", "a: 1  # one"]
    assert "    - {d: 'x: y'}  # two" in text
    assert yaml.safe_load(text) == plain(content)


def test_names_that_yaml_would_misread_survive(draft: Draft, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "yes: no #1.jsonl"
    jsonl(file, [{"off": f"q {n}", "#": f"a {n}"} for n in range(3)])
    result = draft(file, columns={"prompt": "off", "completion": "#"})
    assert result.recipe["name"] == "yes-no-1-sft"
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_rows_and_model_at_addresses_give_a_recipe_that_passes_its_checks(
    draft: Draft, store: Store, tmp_path: Path, bucket: str, tiny_model: Callable[..., Path]
) -> None:
    client = botocore.session.get_session().create_client("s3")
    rows = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2]).read_bytes()
    client.put_object(Bucket=bucket, Key="init/rows.jsonl", Body=rows)
    for path in tiny_model().iterdir():
        client.put_object(Bucket=bucket, Key=f"init/model/{path.name}", Body=path.read_bytes())
    result = draft("s3://bucket/init/*.jsonl", model="s3://bucket/init/model")
    content = yaml.safe_load(result.text)
    assert content["model"] == "s3://bucket/init/model" or content["model"]["name"] == "s3://bucket/init/model"
    assert "s3://bucket/init/*.jsonl" in result.text
    assert problems(tmp_path / "recipe.yaml", store) == []


@pytest.mark.parametrize("option", ["data", "eval_data", "model"])
def test_secret_in_an_option_is_refused_before_anything_is_read_or_written(
    option: str, draft: Draft, tmp_path: Path
) -> None:
    data = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2])
    options = {"data": data, option: "http://127.0.0.1:9/rows.jsonl?sig=SuperSecret12345"}
    with pytest.raises(UserError, match=f"^--{option.replace('_', '-')}: holds a secret") as refusal:
        draft(options.pop("data"), **options)
    assert "SuperSecret12345" not in str(refusal.value)
    assert not (tmp_path / "recipe.yaml").exists()


def test_name_of_a_recipe_has_no_version_of_an_address(draft: Draft, tmp_path: Path, bucket: str) -> None:
    client = botocore.session.get_session().create_client("s3")
    client.create_bucket(Bucket="init-versioned")
    client.put_bucket_versioning(Bucket="init-versioned", VersioningConfiguration={"Status": "Enabled"})
    rows = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2]).read_bytes()
    version = client.put_object(Bucket="init-versioned", Key="rows.jsonl", Body=rows)["VersionId"]
    assert draft(f"s3://init-versioned/rows.jsonl?versionId={version}").recipe["name"] == "rows-sft"
