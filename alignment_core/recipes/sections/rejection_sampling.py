"""Rounds that train on the best of the policy's own completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.rewards import Reward
from alignment_core.recipes.sections.rollout import GenerationConfig, check_ranking
from alignment_core.recipes.sections.training import EVALUATION_FIELDS, TrainingConfig

FIELD = "rejection_sampling"


class BestConfig(Config):
    """Selection of the completions of a round that become demonstrations."""

    strategy: Literal["best_of_n", "top_k", "threshold"] = "best_of_n"
    """Keep the best completion of each prompt (`best_of_n`: RAFT, Llama 2), the `k` best ones of each prompt (`top_k`), or
    all whose score is at least `threshold` or `quantile` (`threshold`: ReST)."""
    score: Literal["reward", "verifier"] = "reward"
    """Score that ranks completions: `reward`, the weighted sum of `rejection_sampling.rewards`, or `verifier`,
    the score of `evaluation.verifier`."""
    k: int | None = Field(None, ge=1)
    """With `top_k`: number of completions to keep per prompt."""
    threshold: float | None = None
    """With `threshold`: minimum score of a completion."""
    quantile: float | None = Field(None, gt=0, lt=1)
    """With `threshold`: the minimum score is this quantile of all scores of the round; 0.75 keeps the best quarter."""
    min_score: float | None = None
    """Drop completions with a lower score, with any strategy. Default: no minimum, so `best_of_n` and `top_k` also keep
    the best completions of prompts without a good one."""
    truncated: Literal["drop", "keep"] = "drop"
    """Drop or keep completions that were truncated at `max_completion_length`. Training on them teaches the policy not to
    stop."""

    @property
    def most_per_prompt(self) -> int | None:
        """Maximum number of completions that are kept per prompt; None: no maximum."""
        return {"best_of_n": 1, "top_k": self.k}.get(self.strategy)

    @model_validator(mode="after")
    def _fields_of_its_strategy(self, info: ValidationInfo) -> BestConfig:
        if self.strategy == "top_k" and self.k is None:
            raise ValueError("`strategy: top_k` needs `k`, the number of completions to keep per prompt")
        if self.strategy == "threshold" and (self.threshold is None) == (self.quantile is None):
            raise ValueError("`strategy: threshold` needs exactly one of `threshold` (a score) and `quantile`")
        if self.strategy != "top_k":
            self.refuse_unused(info, ("k",), f"with `strategy: {self.strategy}`")
        if self.strategy != "threshold":
            self.refuse_unused(
                info,
                ("threshold", "quantile"),
                f"with `strategy: {self.strategy}`",
                "use `min_score` for a lower bound",
            )
        return self


class StopConfig(Config):
    """Early stopping of rounds."""

    metric: Literal["accuracy", "reward"] | None = None
    """Metric that a round must improve on the prompts of `evaluation`: `accuracy`, the mean score of the verifier, or the mean
    `reward`. Default: the one that corresponds to `selection.score` if `evaluation` measures it, else the other one. Without
    an `evaluation`: the mean score of a round's samples, which are samples of the previous round's policy for other
    prompts."""
    min_gain: float = Field(0.01, ge=0)
    """Minimum gain of a round. After a round with a smaller gain no further round runs; the result is the best policy so
    far."""


class RejectionSamplingConfig(Config):
    """Rounds of generate → score → keep the best → SFT."""

    rounds: int = Field(2, ge=1)
    """Number of rounds; with `stop`, the maximum."""
    prompts: DataConfig
    """Prompts to sample from. Every round takes the next slice; no prompt is repeated before all have been used."""
    prompts_per_round: int = Field(1024, ge=1)
    """Number of prompts in each round."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling parameters."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of a completion, whose weighted sum ranks the completions. Default: the reward model of the section
    `reward_model`, or the score that `selection.score` names."""
    selection: BestConfig = BestConfig()
    """Selection of completions."""
    keep_earlier: bool = False
    """Train each round also on the selected completions of earlier rounds (Llama 2)."""
    start_from: Literal["previous", "initial"] = "previous"
    """Policy that a round fine-tunes: that of the previous round, or the one before the first round (`initial`). The previous
    round's policy samples in any case."""
    training: TrainingConfig = TrainingConfig(warmup_ratio=0.03)
    """Optimiser and schedule of one round."""
    stop: StopConfig | None = None
    """Stop after a round without gain. Default: all rounds run."""

    @model_validator(mode="after")
    def _rejects_something(self, info: ValidationInfo) -> RejectionSamplingConfig:
        self.training.refuse_unused(
            info, EVALUATION_FIELDS, "in `rejection_sampling.training`: the completions of a round hold out no rows"
        )
        check_ranking(self.rewards, self.selection.score, self.prompts, FIELD)
        most, sampled = self.selection.most_per_prompt, self.generation.num_generations
        if most is not None and sampled <= most and self.selection.min_score is None:
            raise ValueError(
                f"`{FIELD}.selection` keeps {most} of {sampled} completions per prompt, so it rejects none: raise "
                f"`{FIELD}.generation.num_generations`, or set `{FIELD}.selection.min_score`"
            )
        if self.start_from == "initial" and self.rounds == 1:
            self.refuse_unused(info, ("start_from",), "with a single round")
        return self
