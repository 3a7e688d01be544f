"""Stage: one model out of an artifact that holds several things, as an artifact of its own."""

from __future__ import annotations

import shutil
from typing import Any

from alignment_core.execution.base import Stage, StageConfig, StageContext


class PartConfig(StageConfig):
    """Which folder of the input ``whole`` to take."""

    folder: str


def run(context: StageContext, config: PartConfig) -> dict[str, Any]:
    shutil.copytree(context.inputs["whole"] / config.folder, context.output, dirs_exist_ok=True)
    return {}


STAGE = Stage("part", 1, "model", PartConfig, run)
