"""What a run may drop at its end: nothing here may change a result, so nothing here is part of a stage's key."""

from __future__ import annotations

from pydantic import Field

from alignment_core.recipes.base import Config


class RetentionConfig(Config):
    """What is pruned at the end of every run: in the whole store, and among the journals of this ALIGN_HOME."""

    progress_days: float | None = Field(7.0, gt=0)
    """Days after which the checkpoints of an interrupted stage go, if nobody went on with it; none keeps them."""
    rollouts_days: float | None = Field(None, gt=0)
    """Days after which completions and their scores that no run used lose their bytes (not their records); a run that
    needs them again makes them again. None keeps them."""
    journal_days: float | None = Field(90.0, gt=0)
    """Days after which `align status`, `resume` and `explain` forget a run. The store forgets nothing. None keeps it."""
