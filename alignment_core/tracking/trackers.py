"""The trackers of a recipe, and whether their packages are installed."""

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

OPENLINEAGE = "openlineage.client"


def require(tracking: TrackingConfig) -> None:
    """Raise EnvironmentFault if the package of a configured tracker is not installed."""
    if tracking.wandb is not None:
        require_package("tracking.wandb", "wandb", "leave the field out")
    if tracking.tensorboard:
        require_package("tracking.tensorboard", "tensorboard", "leave the field out")
    if tracking.openlineage is not None:
        require_package("tracking.openlineage", OPENLINEAGE, "leave the field out")


def require_package(what: str, package: str, instead: str) -> None:
    """Raise EnvironmentFault if a package that ``what`` needs is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package above it
        spec = None
    if spec is None or spec.origin is None:  # without an origin it is a folder of that name
        name = "openlineage-python" if package == OPENLINEAGE else package
        raise EnvironmentFault(
            f"{what}: the package {name} is not installed; install this project's extra `tracking`, or {instead}"
        )


@contextmanager
def file_trackers(recipe: BaseRecipe, warn: Warn, store: str = "") -> Iterator[Trackers]:
    """The trackers of the recipe, which write into the run's folder. ``warn`` gets the warnings of W&B, to which ``store``, an
    address, is where artifacts are."""
    tracking = recipe.tracking
    trackers: dict[str, Callable[[], Listener]] = {}
    with ExitStack() as stack:
        if tracking.wandb is not None or tracking.tensorboard:
            try:
                folder = stack.enter_context(run_folder(recipe))
            except OSError as error:
                warn(f"W&B and TensorBoard are off: {error}")
            else:
                trackers = _trackers(recipe, folder, warn, store)
        yield trackers


def _trackers(recipe: BaseRecipe, folder: Path, warn: Warn, store: str) -> dict[str, Callable[[], Listener]]:
    wandb, tensorboard = recipe.tracking.wandb, recipe.tracking.tensorboard
    trackers: dict[str, Callable[[], Listener]] = {}
    if wandb is not None:
        trackers["W&B"] = lambda: WandbRun(wandb, recipe, folder, warn, store)
    if tensorboard:
        logs = folder / "tensorboard" if tensorboard is True else Path(tensorboard).expanduser() / folder.name
        trackers["TensorBoard"] = lambda: TensorBoard(logs)
    return trackers
