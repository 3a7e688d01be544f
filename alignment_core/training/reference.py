"""Log-probabilities under a reference, for DPO and its relatives; most come from the stage ``reference_logps``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from alignment_core.errors import DataError
from alignment_core.models.microbatch import MicroBatch


class ReferenceLogps:
    """Summed log-probabilities in nats: for each split ``[highest row number + 1, columns]`` float32, such as chosen and
    rejected."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self.values = values

    @classmethod
    def read(cls, file: Path, needed: Mapping[str, Sequence[int]]) -> ReferenceLogps:
        """Read the stage's file. ``needed``: row numbers by split. Raises DataError if some of them are missing."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        table = pq.read_table(file)
        names = [name for name in table.column_names if name not in ("split", "row")]
        by_split: dict[str, np.ndarray] = {}
        for split, rows in needed.items():
            part = table.filter(pc.field("split") == split)
            wanted = np.array(rows, np.int64)
            known = part["row"].to_numpy()
            values = np.full((max(known.max(initial=-1), wanted.max(initial=-1)) + 1, len(names)), np.nan, np.float32)
            values[known] = np.stack([part[name] for name in names], axis=1)
            missing = wanted[np.isnan(values[wanted]).any(axis=1)]
            if len(missing):
                raise DataError(
                    f"the reference's log-probabilities are missing for {len(missing)} of the {len(rows)} {split} rows that "
                    f"are used, the first of them row {missing[0]}: they are those of another data set, of fewer steps or of "
                    "another order"
                )
            by_split[split] = values
        return cls(by_split)

    def of(self, split: str, micro: MicroBatch, first: int = 0) -> torch.Tensor:
        """``[S]``: the values of the sequences of a pack, in the columns from ``first`` on."""
        per_row = len(micro.rows[0].sequences) if micro.rows else 0
        values_BS = self.values[split][[row.number for row in micro.rows], first : first + per_row]
        return torch.from_numpy(values_BS.reshape(-1)).to(micro.input_ids.device)
