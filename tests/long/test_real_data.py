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


GSM8K = {"path": str(DATA / "gsm8k" / "train.jsonl"), "rows": 200}
QUESTIONS = {"columns": {"prompt": "question", "label": "answer"}}
DEMONSTRATIONS = {"sources": [{**GSM8K, "columns": {"prompt": "question", "completion": "answer"}}], "max_length": 768}
HH_PROMPTS = {**HH, "max_length": 256, "max_prompt_length": 200}
SLOWLY = {**FEW, "learning_rate": 1e-4}
RECIPE: dict[str, Any] = {
    "method": "comparison",
    "name": "real-data",
    "model": MODEL,
    "sft": {"data": DEMONSTRATIONS, "training": FEW},
    "reward_model": {"data": {**HH, "test_rows": 20}, "training": FEW},
    "branches": {
        "dpo": {"method": "dpo", "dpo": {"data": {**HH, "test_rows": 20}, "training": SLOWLY}},
        "kto": {"method": "kto", "kto": {"data": {**HH, "test_rows": 20}, "training": SLOWLY}},
        "rounds": {
            "method": "iterative-dpo",
            "reward_model": "ours",
            "iterative_dpo": {
                "rounds": 1,
                "prompts": HH_PROMPTS,
                "prompts_per_round": 16,
                "generation": {"num_generations": 2, "max_completion_length": 24},
                "selection": {"truncated": "keep"},
                "training": SLOWLY,
            },
        },
        "rejection": {
            "method": "rejection-sampling",
            "rejection_sampling": {
                "rounds": 1,
                "prompts": {"sources": [{**GSM8K, **QUESTIONS}], "max_prompt_length": 768},
                "prompts_per_round": 16,
                "generation": {"num_generations": 4, "max_completion_length": 32},
                "selection": {"strategy": "best_of_n", "score": "verifier"},
                "training": FEW,
            },
            "evaluation": {
                "prompts": {
                    "sources": [{**GSM8K, **QUESTIONS, "path": str(DATA / "gsm8k" / "test.jsonl"), "rows": 16}],
                    "max_prompt_length": 768,
                },
                "generation": {"num_generations": 1, "max_completion_length": 32},
                "verifier": "math",
            },
        },
    },
    "evaluation": {
        "prompts": {**HH_PROMPTS, "path": str(DATA / "hh-rlhf-harmless" / "test.jsonl"), "rows": 16},
        "generation": {"num_generations": 1, "max_completion_length": 24},
    },
    "resources": {"trainers": 1, "engines": 1},
}


@pytest.fixture(scope="module")
def outcome(align: Align, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of four methods, which saves the start of three."""
    folder = tmp_path_factory.mktemp("real-data")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return align(folder / "home", "run", str(folder / "recipe.yaml"))


@pytest.fixture(scope="module")
def metrics(outcome: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics of each stage, by label."""
    return {stage["label"]: stage["metrics"] for stage in outcome["stages"]}


def test_sft_learns_worked_solutions_of_gsm8k(metrics: dict[str, dict[str, Any]]) -> None:
    assert metrics["sft"]["loss"] < 5.6  # ln 264 is the loss of knowing nothing


def test_dpo_trains_on_pairs_of_hh(metrics: dict[str, dict[str, Any]]) -> None:
    assert 0.3 < metrics["dpo/dpo"]["test_loss"] < 1.0  # ln 2 is the loss of an unchanged policy
    assert metrics["reward-model/data"]["train_rows"] > 100  # the same rows, so the same stage


def test_kto_trains_on_both_answers_of_each_pair_of_hh(metrics: dict[str, dict[str, Any]]) -> None:
    assert metrics["kto/kto/data"]["train_rows"] > 200, "two for each pair"
    assert 0.3 < metrics["kto/kto"]["test_loss"] < 0.7  # 1/2 is the loss of an unchanged policy


def test_a_reward_model_of_hh_ranks_the_answers_of_a_round_of_dpo(outcome: dict[str, Any]) -> None:
    assert set(outcome["metrics"]["policies"]) == {"sft", "dpo", "kto", "rounds", "rejection"}
    assert 0 <= outcome["metrics"]["policies"]["rounds"]["win_rate"] <= 1


def test_a_round_of_rejection_sampling_judges_all_answers_to_gsm8k_and_keeps_whole_ones(
    metrics: dict[str, dict[str, Any]],
) -> None:
    judged, best = metrics["rejection/round-1/judge"], metrics["rejection/round-1/best"]
    assert (judged["completions"], judged["failed_rewards"]) == (16 * 4, 0)
    assert best["rows"] + best["dropped_truncated"] + best["dropped_not_best"] == 16 * 4
    assert metrics["rejection/round-1/sft"]["rows"] == best["rows"]
    assert metrics["rejection/sft/evaluation"]["accuracy.n"] == 16
