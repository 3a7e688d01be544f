"""Stage: held-out prompts and training data → the number of shared prompts."""

from __future__ import annotations

import json
from typing import Any

from alignment_core.data.overlap import read_prompts
from alignment_core.errors import DataError
from alignment_core.execution.base import Stage, StageConfig, StageContext

HELD_OUT = "held_out"
"""Role of the held-out prompts; the other inputs are training data, under the labels of their stages."""
FILE = "overlap.json"


class OverlapConfig(StageConfig):
    """The limit of the overlap."""

    field: str
    """Field of the recipe that names the held-out prompts."""
    max_overlap: float | None = None
    """Maximum fraction of the held-out prompts that may be in the training data; None: no limit."""


def run(context: StageContext, config: OverlapConfig) -> dict[str, Any]:
    held_out = read_prompts(context.inputs[HELD_OUT])
    shared = {role: held_out & read_prompts(folder) for role, folder in context.inputs.items() if role != HELD_OUT}
    count = len(set().union(*shared.values()))
    by_data = {role: len(prompts) for role, prompts in sorted(shared.items()) if prompts}
    finding = sentence(len(held_out), count, by_data)
    if config.max_overlap is not None and count > config.max_overlap * len(held_out):
        raise DataError(
            f"{config.field}: {finding}, so a gate would measure memorisation: hold out other prompts, "
            f"or raise evaluation.max_overlap (it allows {config.max_overlap:.3g} of them)"
        )
    counts: dict[str, Any] = {"prompts": len(held_out), "overlap": count, "shared": by_data}
    (context.output / FILE).write_text(json.dumps(counts, indent=2, sort_keys=True) + "\n")
    return counts | ({"warnings": [f"{config.field}: {finding}"]} if count else {})


def sentence(prompts: int, overlap: int, shared: dict[str, int]) -> str:
    """``3 of 200 prompts are also trained on (3 in sft/data)``."""
    where = ", ".join(f"{count} in {label}" for label, count in shared.items())
    return f"{overlap} of {prompts} prompts {'is' if overlap == 1 else 'are'} also trained on ({where})"


SHOWS = {"overlap": "also trained on", "prompts": "prompts"}
STAGE = Stage("overlap", 1, {"overlap": "overlap"}, OverlapConfig, run, SHOWS)
