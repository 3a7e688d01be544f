"""The model and the machine in a first recipe: their names, sizes and limits, and the numbers that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment_core.artifacts import Store
from alignment_core.checks.memory_needs import parameters
from alignment_core.cluster.device import cpu_multiplies_bf16
from alignment_core.errors import UserError
from alignment_core.init import models
from alignment_core.init.machine import Machine
from alignment_core.init.machine import _visible as machine_visible
from alignment_core.stages.base_model import _parameters
from tests.init.conftest import CPU, GPU, Draft, problems
from tests.init.rows_of_kinds import ROWS, jsonl


def test_lengths_follow_the_rows_and_the_model(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    content = [{"prompt": "q" * n, "completion": "a" * 50} for n in range(1, 101)]
    file = jsonl(tmp_path / "rows.jsonl", content)
    data = draft(file).recipe["sft"]["data"]
    assert 152 <= data["max_length"] <= 192, "100 and 50 bytes, and two special tokens or three"
    assert draft(file).recipe["evaluation"]["generation"]["max_completion_length"] == 64
    content[0]["completion"] = "a" * 500
    result = draft(jsonl(file, content), model=str(tiny_model()))
    assert result.recipe["sft"]["data"]["max_length"] == 256, "the model's whole context"
    assert "overlong" not in result.recipe["sft"]["data"]
    assert "1.0% have more and are dropped" in result.text
    for row in content[:20]:
        row["completion"] = "a" * 500
    assert draft(jsonl(file, content), model=str(tiny_model())).recipe["sft"]["data"]["overlong"] == "truncate"


def test_training_is_in_bf16_where_that_is_faster(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    fast = Machine(0, CPU.memory, cpu_multiplies_bf16=True)
    assert draft(file, GPU).recipe["sft"]["training"]["bf16"] is True
    assert draft(file, fast, model=str(tiny_model())).recipe["sft"]["training"]["bf16"] is True
    assert "bf16" not in draft(file, CPU, model=str(tiny_model())).recipe["sft"]["training"]
    assert "bf16" not in draft(file, fast).recipe["sft"]["training"], (
        "a tiny model: products are not what takes the time"
    )


def test_torch_knows_the_same_instructions_of_this_processor() -> None:
    known = torch.cpu.get_capabilities()
    assert cpu_multiplies_bf16() == any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))


def test_a_cpu_samples_few_answers_of_a_pretrained_model_in_a_step(
    draft: Draft, tmp_path: Path, tiny_model: Any
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(300)])
    options = {"method": "rl", "model": str(tiny_model())}
    steps = [draft(file, machine, **options).recipe["rl"] for machine in (CPU, GPU)]
    assert [(step["prompts_per_step"], step["training"]["batch_size"]) for step in steps] == [(4, 32), (64, 512)]
    assert [step["training"]["learning_rate"] for step in steps] == [5e-6, 5e-6], "of a model of less than 0.4B"


def test_documents_are_held_out_with_all_their_blocks(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    """25 documents of 1,000 bytes are 4 blocks each of a model of 256 tokens; a tenth of them are 2 documents."""
    file = jsonl(tmp_path / "texts.jsonl", [{"text": f"{n:04}".ljust(1000, ".")} for n in range(25)])
    written = draft(file, model=str(tiny_model()), method="continued-pretraining").recipe["continued_pretraining"]
    assert (written["data"]["max_length"], written["data"]["test_rows"]) == (256, 8)
    short = [{"text": f"{n:04}"} for n in range(98)]
    file = jsonl(file, [*short, {"text": "x" * 2500}, {"text": "y" * 3000}])
    written = draft(file, model=str(tiny_model()), method="continued-pretraining").recipe["continued_pretraining"]
    assert written["data"]["test_rows"] == 12, "of 98 + 10 + 12 blocks; two documents have many"


def test_kto_counts_both_answers_of_a_pair(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    """Of 40 pairs 4 are held out, and 72 rows in batches of 16 are 5 steps an epoch: 6 epochs for 30 steps."""
    pairs = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(40)]
    written = draft(jsonl(tmp_path / "pairs.jsonl", pairs), model=str(tiny_model()), method="kto").recipe["kto"]
    assert (written["training"]["batch_size"], written["training"]["num_train_epochs"]) == (16, 6)


def test_a_model_that_is_too_big_gets_adapters(draft: Draft, tmp_path: Path, tiny_model: Any) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    full = draft(file, CPU, model=str(tiny_model())).recipe["sft"]["training"]
    small = draft(file, Machine(0, 2 << 20), model=str(tiny_model()))
    training = small.recipe["sft"]["training"]
    assert ("lora" in full, "lora" in training) == (False, True)
    assert training["learning_rate"] == pytest.approx(10 * full["learning_rate"])
    assert "lora" in draft(file, Machine(0, 1000), model=str(tiny_model())).recipe["sft"]["training"]


def test_parameters_are_counted_by_the_shape(tiny_model: Any) -> None:
    shape = json.loads((tiny_model() / "config.json").read_text())
    assert parameters(shape) == pytest.approx(_parameters(tiny_model()), rel=0.02)
    qwen = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    qwen |= {"intermediate_size": 4864, "vocab_size": 151936}
    assert parameters({**qwen, "tie_word_embeddings": True}) == pytest.approx(494e6, rel=0.01), "its model card"
    moe = {**qwen, "moe_intermediate_size": 608, "num_experts": 8}
    assert parameters({"text_config": moe}) == parameters(qwen), "8 experts of an eighth of the size"
    assert parameters({}) == 0


@pytest.mark.parametrize(("machine", "student"), [(CPU, "SmolLM2-135M"), (GPU, "Qwen2.5-0.5B")])
def test_the_default_model_is_one_that_the_machine_can_train(
    machine: Machine, student: str, draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its teacher is a larger one of the same family, which has its tokenizer."""
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    file = jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2])
    written = draft(file, machine, model=None, method="distillation").recipe
    assert student in written["model"]
    teacher = written["distillation"]["teacher"]["model"]
    assert teacher != written["model"]
    assert teacher.partition("-")[0] == written["model"].partition("-")[0]


@pytest.mark.parametrize(
    ("visible", "left"), [(None, [1, 2]), ("", []), ("1", [2]), ("0,1", [1, 2]), ("7", []), ("-1", []), ("GPU-a", [1])]
)
def test_only_gpus_that_a_run_would_see_count(
    visible: str | None, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_visible([1, 2]) == left


def test_a_tag_of_the_store_is_a_model_and_never_the_default(
    store: Store, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    store.tags.move(models.PRODUCTION, store.publish(tiny_model(), "model"), None, "made")
    default = models.choose(None, store)
    assert default.name == models.DEFAULT_MODEL
    assert models.choose(None, store, gpus=1).name == models.DEFAULT_ON_GPUS
    assert "--model policy/production" in default.why
    chosen = models.choose(models.PRODUCTION, store)
    assert (chosen.name, chosen.context, chosen.parameters) == (models.PRODUCTION, 256, pytest.approx(90624, rel=0.02))


def test_a_folder_is_named_from_where_the_recipe_lies(
    draft: Draft, tmp_path: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "work" / "base").symlink_to(tiny_model())
    jsonl(tmp_path / "work" / "rows.jsonl", ROWS["messages"][2])
    monkeypatch.chdir(tmp_path / "work")
    result = draft("rows.jsonl", model="base", output=Path("recipe.yaml"))
    assert (result.recipe["model"], result.recipe["sft"]["data"]["sources"][0]["path"]) == ("./base", "rows.jsonl")
    result = draft("rows.jsonl", model="base", output=Path("../recipes/recipe.yaml"))
    assert result.recipe["model"] == "../work/base"
    assert [source["path"] for source in result.recipe["sft"]["data"]["sources"]] == [
        "../work/rows.jsonl",
        "recipe.held-out.jsonl",
    ]
    monkeypatch.chdir(tmp_path)
    assert problems(tmp_path / "recipes" / "recipe.yaml", store) == []


@pytest.mark.parametrize(
    ("model", "sentence"),
    [("./nothing", "--model ./nothing: no such folder"), ("{tmp}", "is a folder without config.json")],
)
def test_a_model_that_is_none_is_refused(model: str, sentence: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        models.choose(model.format(tmp=tmp_path), store)
    assert sentence in str(error.value)


def test_an_unverifiable_hub_name_still_gives_a_recipe(
    draft: Draft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS["messages"][2]), model="someone/unknown")
    assert "HF_HUB_OFFLINE is set, and the local Hub cache holds no" in str(result.profile.model.problem)
    assert result.recipe["model"] == "someone/unknown"
    assert "# tokens; the rows were not measured" in result.text
