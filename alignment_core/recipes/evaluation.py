"""How to judge a policy, and what a promotion must pass."""

from __future__ import annotations

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.data import DataConfig
from alignment_core.recipes.rollout import GenerationConfig


class EvaluationConfig(Config):
    """Sampling on held-out prompts and the statistics made of it."""

    prompts: DataConfig
    """Held-out prompts."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling."""
    verifier: str | None = None
    """Function that scores one completion: `task` (the built-in task's own), `module:function` or `file.py:function`.
    It is called with prompt, completion and label, and returns a number in [0, 1]."""
    win_margin: float = Field(0.0, ge=0)
    """Rewards closer than this are a tie, worth half a win."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the bootstrap intervals."""
    resamples: int = Field(2000, ge=100)
    """Bootstrap resamples (of prompts)."""


class Gate(Config):
    """One condition on a metric; a promotion must pass all of them."""

    metric: str
    """Metric of the last policy: `accuracy`, `reward`, `win_rate`, `kl`; `win_rate.low` and `.high` are the ends of
    its interval."""
    min: float | None = None
    """Least value."""
    max: float | None = None
    """Largest value."""
    min_gain: float | None = None
    """Least gain over the baseline's value of the same metric."""

    @model_validator(mode="after")
    def _some_bound(self) -> Gate:
        if self.min is None and self.max is None and self.min_gain is None:
            raise ValueError("a gate needs at least one of `min`, `max` and `min_gain`")
        return self


class PromotionConfig(Config):
    """Which tag moves to the new policy, and when."""

    tag: str = "policy/production"
    """The tag to move."""
    gates: tuple[Gate, ...] = ()
    """Conditions that must all hold."""
