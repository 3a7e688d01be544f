"""Trackers of a run: nothing here may change a result, so nothing here is part of a stage's key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import FolderPath


class WandbConfig(Config):
    """A run in Weights & Biases. The API key comes from the environment or `wandb login`, never from the recipe."""

    project: str = Field(min_length=1)
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the run. Default: your own default entity."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto` is online if you are logged in; offline runs are kept in `$ALIGN_HOME/tracking` until `wandb sync`. `WANDB_MODE`,
    `WANDB_DISABLED`, `wandb offline` and `wandb disabled` forbid what they forbid elsewhere, whatever stands here."""


class TrackingConfig(Config):
    """Trackers in addition to the console and the Prefect UI. One that fails is switched off; the run continues."""

    wandb: WandbConfig | None = None
    """Weights & Biases."""
    tensorboard: bool | Annotated[FolderPath, Field(min_length=1)] = False
    """TensorBoard files: `true` writes them under `$ALIGN_HOME/tracking`, a folder's path under that folder."""
