"""Stage: rows and a reference policy → the reference's log-probability of each completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import Field

from alignment_core.errors import DataError, NumericError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.execution.forward_passes import ForwardPasses
from alignment_core.models.quantization import Bits

BLOCK = 64
"""Completions per block of one rank; a kill loses at most one block per rank."""
PAIRS = ("chosen", "rejected")


class ReferenceLogpsConfig(StageConfig):
    """The rows, and how the ``model`` computes. Only settings of the training that affect the values are here, so that
    trainings with another loss or learning rate share them."""

    bf16: bool = False
    """Whether to compute in bfloat16, as the policy does."""
    load_in_4bit: bool = Field(False, exclude_if=lambda used: not used)
    """Whether its linear layers are in 4 bits, as those of a policy trained with QLoRA."""
    load_in_8bit: bool = Field(False, exclude_if=lambda used: not used)
    """Whether they are in 8 bits."""
    max_steps: int | None = None
    """Maximum number of training steps: only the rows of these steps are computed, and all held-out ones; None: all rows."""
    batch_size: int = 0
    """Rows per step, if ``max_steps`` is set."""
    order: int = 0
    """Seed of the order of rows, if ``max_steps`` is set: that of the training stage."""
    completions: tuple[str, ...] = Field(PAIRS, exclude_if=lambda names: names == PAIRS)
    """Names of a row's completions: their ids are in the columns ``<name>_ids``, results in ``<name>_logp``."""
    mismatched: bool = Field(False, exclude_if=lambda wanted: not wanted)
    """Whether to add ``mismatched_logp``, of each prompt with the first completion of another row, see
    :mod:`alignment_core.training.kto_mismatch`."""
    ld_alpha: float | None = Field(None, exclude_if=lambda alpha: alpha is None)
    """α of LD-DPO: weight of the tokens of a completion beyond the length of the shortest one of its row."""

    def packages_used(self) -> tuple[str, ...]:
        return ("bitsandbytes",) if self.base_bits else ()

    @property
    def base_bits(self) -> Bits | None:
        """Bits of a weight of its linear layers; None: they are not quantised."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None


def run(context: StageContext, config: ReferenceLogpsConfig) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from alignment_core.columns import column
    from alignment_core.data.row_order import is_shuffled
    from alignment_core.training.kto_mismatch import mismatched
    from alignment_core.training.training_rows import first_rows, images_by_row

    tables = {
        split: pq.read_table(file)
        for split in ("train", "test")
        if (file := context.inputs["data"] / f"{split}.parquet").is_file()
    }
    if "train" not in tables:
        raise DataError("the data set holds no training rows")
    names = (*config.completions, *(("mismatched",) if config.mismatched else ()))
    rows, pairs, beginnings = [], [], []
    for split, table in tables.items():
        used = config.max_steps * config.batch_size if split == "train" and config.max_steps else len(table)
        prompts, *sides = (column(table, f"{name}_ids") for name in ("prompt", *config.completions))
        images = images_by_row(table, context.inputs["data"])
        if config.mismatched:
            sides.append(mismatched(prompts, sides[0], split, images))
        for number in first_rows(used, len(table), config.order, is_shuffled(table.schema)):
            rows.append((split, number))
            pairs += [(prompts[number], side[number], (), *images[number]) for side in sides]
            if config.ld_alpha is not None:
                shared = min(len(side[number]) for side in sides)
                beginnings += [
                    (prompts[number], side[number][:shared], side[number][shared:], *images[number]) for side in sides
                ]
    passes = ForwardPasses(context, BLOCK)
    with passes.using_trainers():
        model = replace(context.model("model"), bits=config.base_bits)
        logps_BS = passes(model, "lm", "reference", pairs + beginnings, config.bf16).reshape(-1, len(names))
    if beginnings:
        whole_BS, beginning_BS = np.split(logps_BS, 2)
        logps_BS = beginning_BS + np.float32(config.ld_alpha) * (whole_BS - beginning_BS)
    broken = np.flatnonzero(~np.isfinite(logps_BS).all(axis=1))
    if len(broken):
        split, row = rows[broken[0]]
        raise NumericError(f"the reference's log-probability of row {row} of the {split} rows is not finite")
    splits, numbers = zip(*rows, strict=True)
    logps = {f"{name}_logp": logps_BS[:, place] for place, name in enumerate(names)}
    pq.write_table(
        pa.table({"split": splits, "row": numbers, **logps}), context.output / "logps.parquet", compression="zstd"
    )
    return {"rows": len(rows)}


SHOWS = {"rows": "rows"}
STAGE = Stage(
    "reference_logps",
    1,
    {"reference_logps": "reference-logps"},
    ReferenceLogpsConfig,
    run,
    SHOWS,
    packages=("torch", "transformers"),
)
