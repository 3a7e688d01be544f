"""Checkpoints of a job on trainer ranks, which lie on the machine of the stage: it decides which of them count."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import UserError
from alignment_core.training.checkpoints import CURVE, complete, described, folder_of, newest_progress
from alignment_core.training.rank_folders import bring, write


class Resumable(Protocol):
    """The object that each rank holds of a job with checkpoints."""

    def layout(self) -> dict[str, Any]:
        """Properties that a checkpoint must share with this job."""

    def prepare(self, checkpoint: Path | None) -> dict[str, Any]:
        """Continue from a complete checkpoint, if there is one; returns the progress of the job."""

    def describe(self) -> dict[str, Any]:
        """The description of a checkpoint of this step, with its ``step`` and ``layout``."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step."""


S = TypeVar("S", bound=Resumable)


def resume(groups: Sequence[ActorGroup[S]], progress: Path) -> dict[str, Any]:
    """Continue a job on all of its groups from the newest checkpoint in ``progress`` that is complete; returns the progress of
    the first group.

    Raises UserError if it is of another layout: the job would start again, and its first save would delete the checkpoint.
    """
    newest = newest_progress(progress)
    if newest is not None:
        _check_layout(newest, _of_layout(_merged(group.all(Resumable.layout)[0] for group in groups)))
        for group in groups:
            bring(group, newest)
    states = [group.all(Resumable.prepare, newest)[0] for group in groups]
    return states[0]


def _check_layout(checkpoint: Path, layout: dict[str, Any]) -> None:
    stored = described(checkpoint)
    if stored["layout"] != layout:
        raise UserError(
            f"the checkpoint of step {stored['step']} is of {_resources_of(stored['layout'])}, and cannot be read with "
            f"{_resources_of(layout)}: set these resources as they were to continue, or run the stage again from its first "
            "step (`align run --from-stage`). A training that began with `resources.progress: store` "
            "continues on any number of trainers"
        )


def _resources_of(layout: dict[str, Any]) -> str:
    """The fields of the recipe that a layout follows from, as a recipe has them."""
    if "portable" in layout:
        return "`progress: store`"
    world, stage, offload = layout["world"], layout["zero_stage"], str(layout["offload_optimizer"]).lower()
    of_critic = f", with a critic of {_resources_of(layout['critic'])}" if "critic" in layout else ""
    parts = f", `trainer_tensor_parallel_size: {layout['tensor_parallel']}`" if "tensor_parallel" in layout else ""
    return f"`trainers: {world}`{parts}, `zero_stage: {stage}` and `offload_optimizer: {offload}`{of_critic}"


def _merged(descriptions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The descriptions of several groups in one, entries of equal names merged if they have entries."""
    merged: dict[str, Any] = {}
    for description in descriptions:
        for name, value in description.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def _of_layout(layout: dict[str, Any]) -> dict[str, Any]:
    """A layout without that of a critic which is the same: then it does not matter in which group the critic is."""
    rest = {name: value for name, value in layout.items() if name != "critic"}
    return rest if layout.get("critic") == rest else layout


def save_progress(groups: Sequence[ActorGroup[S]], progress: Path, curve: bytes = b"", **more: Any) -> bool:
    """Write a checkpoint of this step of all groups of a job below ``progress``, with the metrics of the steps so far; ``more``
    is added to its description. It counts once it is complete. False if that of this step is there already, and stays as it is.

    When it returns, all of it is on this machine's disk, so that older ones may be removed. Raises EnvironmentFault if a
    disk has no room for it.
    """
    description = _merged(group.all(Resumable.describe)[0] for group in groups)
    description["layout"] = _of_layout(description["layout"])
    folder = folder_of(progress, description["step"])
    if newest_progress(progress, description["layout"]) == folder:
        return False  # the one that this run resumed from
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed while it wrote
    for group in groups:
        write(group, [folder], Resumable.save, folder)
    if curve:
        (folder / CURVE).write_bytes(curve)
    complete(folder, {**description, **more})
    return True
