"""How to sample completions and how to make preference pairs of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from alignment_core.recipes.base import Config
from alignment_core.recipes.data import DataConfig
from alignment_core.recipes.training import DpoLossConfig, TrainingConfig


class GenerationConfig(Config):
    """Sampling. The names are vLLM's and TRL's."""

    num_generations: int = Field(4, ge=1)
    """Completions per prompt."""
    max_completion_length: int = Field(256, ge=1)
    """Longest completion in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(0, ge=0)
    """Sample among the k likeliest tokens; 0 means all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less likely than this share of the likeliest."""
    shard_size: int = Field(64, ge=1)
    """Prompts per shard: the unit of work that is whole or absent after a crash."""


class SelectionConfig(Config):
    """Which completions of a prompt become a pair of chosen and rejected."""

    strategy: Literal["best_worst", "best_random", "random_pair", "all_pairs"] = "best_worst"
    """Best against worst, best against a random other, two at random, or every pair; the higher score is chosen."""
    score: Literal["reward", "verifier"] = "reward"
    """What ranks the completions."""
    min_margin: float = Field(0.0, ge=0)
    """Least difference of score; equal scores are never a pair."""
    max_pairs_per_prompt: int = Field(1, ge=1)
    """With `all_pairs`: keep those with the largest margins."""


class IterativeDpoConfig(Config):
    """Rounds of generate → score → select → train."""

    rounds: int = Field(2, ge=1)
    """Number of rounds."""
    prompts: DataConfig
    """Prompts to sample for; every round takes the next slice, so that no prompt is used twice before all were."""
    prompts_per_round: int = Field(1024, ge=1)
    """Prompts in each round."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling."""
    selection: SelectionConfig = SelectionConfig()
    """Pair selection."""
    loss: DpoLossConfig = DpoLossConfig()
    """The preference loss."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6)
    """Optimiser and schedule of one round."""
    reference: Literal["previous", "initial"] = "previous"
    """The reference policy of a round: the policy at its start, or the one before the first round."""
