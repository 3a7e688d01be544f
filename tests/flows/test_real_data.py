"""Runs on real data: GSM8K's worked solutions and HH preference pairs, with a small model of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.align import Align

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="the folder with the real data is not beside the checkout"),
]

MODEL = {
    "scratch": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
    }
}
FEW = {"max_steps": 3, "batch_size": 8, "learning_rate": 1e-3}
HH = {
    "path": str(DATA / "hh-rlhf-harmless" / "train.jsonl"),
    "rows": 200,
    "max_length": 512,
    "overlong": "truncate",
    "max_bad_rows": 0.05,
}


def run(align: Align, home: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    path = home / f"{recipe['name']}.yaml"
    path.write_text(yaml.safe_dump({"model": MODEL, "resources": {"trainers": 1, "engines": 1}, **recipe}))
    return align(home / "home", "run", str(path))


def test_sft_on_gsm8k_then_dpo_on_hh_pairs(align: Align, tmp_path: Path) -> None:
    gsm8k = {
        "path": str(DATA / "gsm8k" / "train.jsonl"),
        "columns": {"prompt": "question", "completion": "answer"},
        "rows": 200,
    }
    outcome = run(
        align,
        tmp_path,
        {
            "method": "dpo",
            "name": "sft-dpo",
            "sft": {"data": {"sources": [gsm8k], "max_length": 768}, "training": FEW},
            "dpo": {"data": {**HH, "test_rows": 20}, "training": {**FEW, "learning_rate": 1e-4}},
        },
    )
    metrics = {stage["label"]: stage["metrics"] for stage in outcome["stages"]}
    assert metrics["sft"]["loss"] < 5.6  # ln 264 is the loss of knowing nothing
    assert 0.3 < metrics["dpo"]["test_loss"] < 1.0  # ln 2 is the loss of an unchanged policy
    assert metrics["dpo/data"]["train_rows"] > 100


def test_a_reward_model_and_one_round_of_dpo_on_hh(align: Align, tmp_path: Path) -> None:
    prompts = {**HH, "max_length": 256, "max_prompt_length": 200}
    outcome = run(
        align,
        tmp_path,
        {
            "method": "iterative-dpo",
            "name": "hh",
            "reward_model": {"data": {**HH, "test_rows": 20}, "training": FEW},
            "iterative_dpo": {
                "rounds": 1,
                "prompts": prompts,
                "prompts_per_round": 16,
                "generation": {"num_generations": 2, "max_completion_length": 24},
                "training": {**FEW, "learning_rate": 1e-4},
            },
            "evaluation": {
                "prompts": {**prompts, "path": str(DATA / "hh-rlhf-harmless" / "test.jsonl"), "rows": 16},
                "generation": {"num_generations": 1, "max_completion_length": 24},
            },
        },
    )
    assert set(outcome["metrics"]["policies"]) == {"start", "round-1"}
    assert 0 <= outcome["metrics"]["policies"]["round-1"]["win_rate"] <= 1
    assert outcome["outputs"]["reward_model"].startswith("reward-model@sha256:")


def test_kto_on_hh_pairs(align: Align, tmp_path: Path) -> None:
    """Pairs are split into desirable and undesirable answers."""
    kto = {"data": {**HH, "test_rows": 20}, "training": {**FEW, "learning_rate": 1e-4}}
    outcome = run(align, tmp_path, {"method": "kto", "name": "hh-kto", "kto": kto})
    metrics = {stage["label"]: stage["metrics"] for stage in outcome["stages"]}
    assert metrics["kto/data"]["train_rows"] > 200, "two for each pair"
    assert 0.3 < metrics["kto"]["test_loss"] < 0.7  # 1/2 is the loss of an unchanged policy


def test_rejection_sampling_on_gsm8k_with_its_verifier(align: Align, tmp_path: Path) -> None:
    """So small a model solves nothing: the round keeps nothing below `min_score`, and says so."""
    gsm8k = {"path": str(DATA / "gsm8k" / "train.jsonl"), "rows": 200}
    demonstrations = {**gsm8k, "columns": {"prompt": "question", "completion": "answer"}}
    prompts = {"columns": {"prompt": "question", "label": "answer"}}
    section = {
        "rounds": 1,
        "prompts": {"sources": [{**gsm8k, **prompts}], "max_prompt_length": 768},
        "prompts_per_round": 16,
        "generation": {"num_generations": 4, "max_completion_length": 32},
        "selection": {"strategy": "best_of_n", "score": "verifier"},
        "training": FEW,
    }
    held_out = {"sources": [{**gsm8k, **prompts, "path": str(DATA / "gsm8k" / "test.jsonl"), "rows": 16}]}
    outcome = run(
        align,
        tmp_path,
        {
            "method": "rejection-sampling",
            "name": "gsm8k",
            "sft": {"data": {"sources": [demonstrations], "max_length": 768}, "training": FEW},
            "rejection_sampling": section,
            "evaluation": {
                "prompts": {**held_out, "max_prompt_length": 768},
                "generation": {"num_generations": 1, "max_completion_length": 32},
                "verifier": "math",
            },
        },
    )
    assert set(outcome["metrics"]["policies"]) == {"sft", "round-1"}
    print({s["label"]: s["metrics"] for s in outcome["stages"]})
