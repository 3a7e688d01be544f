"""Shapes of public models, from their config.json on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.workload import Lengths, Work, work_of
from alignment_core.recipes import BaseRecipe, load_recipe

LLAMA_2: dict[str, dict[str, Any]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
    "34B": {
        "hidden_size": 8192,
        "intermediate_size": 22016,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
QWEN_2_5_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def llama(size: str) -> Architecture:
    """Llama 2; of 34B, Code Llama."""
    return Architecture.of({**LLAMA_2[size], "vocab_size": 32000, "tie_word_embeddings": False})


def recipe_of(folder: Path, content: dict[str, Any]) -> BaseRecipe:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump({"name": "planned", "model": {"name": "some/model"}, **content}))
    return load_recipe(file)


def only_work(recipe: BaseRecipe, lengths: Lengths | None = None) -> Work:
    [work] = work_of(recipe, lengths or Lengths())
    return work


def ppo(resources: dict[str, Any], prompts: int = 1024, batch_size: int = 128) -> dict[str, Any]:
    """PPO with a reward model, a critic and a reference: prompts and completions of 1,024 tokens."""
    return {
        "method": "rl",
        "rl": {
            "prompts": {"path": "some/prompts", "max_prompt_length": 1024},
            "steps": 10,
            "prompts_per_step": prompts,
            "generation": {"num_generations": 1, "max_completion_length": 1024},
            "rewards": [{"reward_model": "some/reward-model"}],
            "advantage": {"estimator": "gae"},
            "critic": {},
            "kl": {"coefficient": 0.01, "place": "reward"},
            "training": {"batch_size": batch_size, "bf16": True},
        },
        "resources": resources,
    }
