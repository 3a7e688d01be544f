"""The quickstart, cut down so that a hundred kills take an hour: the same graph, less of everything."""

from __future__ import annotations

from pathlib import Path

RECIPE = Path(__file__).parents[2] / "deployments" / "recipes" / "quickstart.yaml"
OVERRIDES = [
    "model={scratch: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}",
    "sft.training.max_steps=60",
    "reward_model.training.max_steps=40",
    "iterative_dpo.rounds=1",
    "iterative_dpo.prompts_per_round=64",
    "iterative_dpo.generation.shard_size=8",
    "iterative_dpo.training.max_steps=10",
    "iterative_dpo.selection.min_margin=0",
    *(f"sft.data.sources.{i}.rows=1500" for i in range(3)),
    *(f"reward_model.data.sources.{i}.rows=500" for i in range(3)),
    *(f"iterative_dpo.prompts.sources.{i}.rows=40" for i in range(3)),
    *(f"evaluation.prompts.sources.{i}.rows=16" for i in range(3)),
    "reward_model.data.test_rows=60",
    "promotion.gates=[]",
    "resources={trainers: 1, engines: 1, zero_stage: 0, progress_seconds: 1, stop_seconds: 5}",
]
COMMAND = ["run", str(RECIPE), *(part for one in OVERRIDES for part in ("--set", one))]
