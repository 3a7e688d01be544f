"""Which trackers a recipe asks for, and whether this machine has them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.sections.tracking import TrackingConfig
from alignment_core.tracking.folder import run_folder
from alignment_core.tracking.guard import Trackers, Warn
from alignment_core.tracking.listener import Listener
from alignment_core.tracking.tensorboard import TensorBoard
from alignment_core.tracking.wandb import WandbRun


def require(tracking: TrackingConfig) -> None:
    """Raise EnvironmentFault if a tracker is asked for whose package is not installed."""
    for package, asked in (("wandb", tracking.wandb is not None), ("tensorboard", bool(tracking.tensorboard))):
        found = importlib.util.find_spec(package) if asked else None
        if asked and (found is None or found.origin is None):  # a folder of that name is no package
            raise EnvironmentFault(
                f"tracking.{package}: the package {package} is not installed; install this project's extra `tracking`, "
                "or leave the field out"
            )


@contextmanager
def file_trackers(recipe: BaseRecipe, warn: Warn) -> Iterator[Trackers]:
    """The trackers that the recipe asks for; what they write is in the run's folder. ``warn`` gets W&B's complaints."""
    tracking = recipe.tracking
    trackers: dict[str, Callable[[], Listener]] = {}
    with ExitStack() as held:
        if tracking.wandb is not None or tracking.tensorboard:
            try:
                folder = held.enter_context(run_folder(recipe))
            except OSError as error:
                warn(f"W&B and TensorBoard are off: {error}")
            else:
                trackers = _trackers(recipe, folder, warn)
        yield trackers


def _trackers(recipe: BaseRecipe, folder: Path, warn: Warn) -> dict[str, Callable[[], Listener]]:
    wandb, tensorboard = recipe.tracking.wandb, recipe.tracking.tensorboard
    trackers: dict[str, Callable[[], Listener]] = {}
    if wandb is not None:
        trackers["W&B"] = lambda: WandbRun(wandb, recipe, folder, warn)
    if tensorboard:
        logs = folder / "tensorboard" if tensorboard is True else Path(tensorboard).expanduser() / folder.name
        trackers["TensorBoard"] = lambda: TensorBoard(logs)
    return trackers
