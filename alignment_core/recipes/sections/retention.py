"""What a run may delete when it ends: nothing here may change a result, so nothing here is part of a stage's key."""

from __future__ import annotations

from pydantic import Field

from alignment_core.recipes.base import Config


class RetentionConfig(Config):
    """What is deleted at the end of every run: in the whole store, and among the journals of this ALIGN_HOME."""

    progress_days: float | None = Field(7.0, gt=0)
    """Days after which the checkpoints of an interrupted stage are deleted if nobody resumed it. Null keeps them."""
    rollouts_days: float | None = Field(None, gt=0)
    """Days after which completions, scores and trajectories that no run has used are deleted; their records stay, and
    a run that needs them computes them again. Default: they are kept."""
    journal_days: float | None = Field(90.0, gt=0)
    """Days after which `align status`, `resume` and `explain` forget a run; the store keeps what it
    has. Null keeps all."""
