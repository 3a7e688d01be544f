"""Recipes of campaigns: those of deployments/recipes, reduced so that a hundred kills take an hour. The same graph, with
less of everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
SHARED = {
    "model": {
        "scratch": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    },
    "resources": {"trainers": 1, "engines": 1, "zero_stage": 0, "progress_seconds": 1, "stop_seconds": 5},
    "promotion.gates": [],
}
QUICKSTART = {
    "sft.training.max_steps": 60,
    "reward_model.training.max_steps": 40,
    "iterative_dpo.rounds": 1,
    "iterative_dpo.prompts_per_round": 64,
    "iterative_dpo.generation.shard_size": 8,
    "iterative_dpo.training.max_steps": 10,
    "iterative_dpo.selection.min_margin": 0,
    "iterative_dpo.selection.truncated": "keep",
    **{f"sft.data.sources.{i}.rows": 1500 for i in range(3)},
    **{f"reward_model.data.sources.{i}.rows": 500 for i in range(3)},
    **{f"iterative_dpo.prompts.sources.{i}.rows": 40 for i in range(3)},
    **{f"evaluation.prompts.sources.{i}.rows": 16 for i in range(3)},
    "reward_model.data.test_rows": 60,
}
STEPS, PROMPTS, GENERATIONS, STALENESS = 12, 4, 4, 1
RL = {
    "sft.training.max_steps": 10,
    **{f"sft.data.sources.{i}.rows": 200 for i in range(3)},
    **{f"rl.prompts.sources.{i}.rows": 10 for i in range(3)},
    "rl.steps": STEPS,
    "rl.prompts_per_step": PROMPTS,
    "rl.generation": {"num_generations": GENERATIONS, "max_completion_length": 24, "shard_size": 2},
    "rl.filter": {"low": 0, "high": 1, "max_refills": 4},
    "rl.training.learning_rate": 1e-4,
    "rl.training.batch_size": PROMPTS * GENERATIONS,
    "evaluation": None,
}
AHEAD = {
    "rl.generation": {"num_generations": GENERATIONS, "max_completion_length": 100},
    "rl.execution": {"max_staleness": STALENESS, "partial_rollouts": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rl": {},
    "rl-ahead": AHEAD,
    "rl-ahead-whole": AHEAD | {"rl.execution": {"max_staleness": STALENESS, "partial_rollouts": False}},
    "rl-environment": {
        "rl.environment": {"name": "tests.crash.answers:Echo"},
        "rl.generation.max_completion_length": 80,
    },
    "rl-critic": {
        "reward_model": {
            "data": {"sources": [{"task": "reverse", "rows": 200}], "test_rows": 20},
            "training": {"batch_size": 16, "learning_rate": 1e-3, "max_steps": 10},
        },
        "rl.advantage": {"estimator": "gae", "whiten": "mean-and-deviation"},
        "rl.critic": {"learning_rate": 1e-3, "freezing_steps": 1},
        "rl.kl": {"coefficient": 0.1, "place": "reward"},
        "rl.ema": {"decay": 0.9},
        "rl.filter": None,
    },
}
"""Reinforcement learning: in step with sampling; ahead of it, the completions going on with new weights, or not; with an
environment; with a reward model, a critic, a reference and a moving average."""
AHEAD_OF_TRAINING = ("rl-ahead", "rl-ahead-whole")
NAMES = ("quickstart", *VARIANTS)


def command(name: str, urls: Sequence[str] = ()) -> list[str]:
    """Arguments of ``align`` for the recipe of this name; ``urls`` are the replicas that reward it."""
    if name == "quickstart":
        return _command("quickstart.yaml", QUICKSTART)
    variant = VARIANTS[name]
    first: dict[str, Any] = {"verifier": "tests.crash.answers:share_of_small_letters"}
    if "rl.environment" in variant:
        first = {"environment": True}
    if "reward_model" in variant:
        first = {"reward_model": "ours"}
    rewards = [first, {"urls": list(urls), "batch_size": 4}]
    running = [{**reward, "normalise": "running"} for reward in rewards]
    return _command("grpo.yaml", RL | {"rl.rewards": running} | variant)


def _command(recipe: str, changes: dict[str, Any]) -> list[str]:
    fields = [f"{field}={json.dumps(value)}" for field, value in (SHARED | changes).items()]
    return ["run", str(RECIPES / recipe), *(part for field in fields for part in ("--set", field))]
