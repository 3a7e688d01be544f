"""Deletion at the end of a run. It never changes a result, so it is not part of stage keys."""

from __future__ import annotations

from pydantic import Field

from alignment_core.recipes.base import Config


class RetentionConfig(Config):
    """Deletion at the end of every run, in the whole store and among the journals of this ALIGN_HOME."""

    progress_days: float | None = Field(7.0, gt=0)
    """Days after which the checkpoints of an interrupted stage that was not resumed are deleted. Null keeps them."""
    rollouts_days: float | None = Field(None, gt=0)
    """Days after which unused completions, scores and trajectories are deleted. Their records stay, and a run that needs them
    computes them again. Default: they are kept."""
    masters_days: float | None = Field(7.0, gt=0)
    """Days after which unused fp32 master weights (`training.keep_master_weights`) are deleted, except those of policies to
    which a tag points, or would point after `align rollback`: the next night needs them. The policies stay; to train them
    further, set `keep_master_weights: false`, which starts from the weights in bfloat16. Null keeps them."""
    journal_days: float | None = Field(90.0, gt=0)
    """Days after which a run is removed from `align status`, `resume` and `explain`; the store is not affected. Null keeps all
    runs."""
