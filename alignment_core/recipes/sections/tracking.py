"""Trackers of a run. They never change a result, so they are not part of stage keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import EventsTarget, FolderPath


class WandbConfig(Config):
    """A run in Weights & Biases. The API key comes from the environment or `wandb login`, never from the recipe."""

    project: str = Field(min_length=1)
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the run. Default: your own default entity."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto` is online if you are logged in; offline runs are kept in `$ALIGN_HOME/tracking` until `wandb sync`. `WANDB_MODE`,
    `WANDB_DISABLED`, `wandb offline` and `wandb disabled` take precedence."""


class TrackingConfig(Config):
    """Trackers in addition to the console and the Prefect UI. A failing tracker is disabled; the run continues."""

    wandb: WandbConfig | None = None
    """Weights & Biases."""
    tensorboard: bool | Annotated[FolderPath, Field(min_length=1)] = False
    """Write TensorBoard files: `true` for `$ALIGN_HOME/tracking`, or the path of a folder."""
    openlineage: Annotated[EventsTarget, Field(min_length=1)] | None = None
    """Write [OpenLineage](https://openlineage.io) events of every stage (START, COMPLETE, FAIL, ABORT): the path of a file, to
    which they are appended as lines of JSON, or the `http(s)://` address of a server, such as Marquez. A key for the server
    comes from `OPENLINEAGE_API_KEY`."""
