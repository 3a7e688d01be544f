"""Log-probabilities under a reference, which DPO and its relatives compare with: computed once, before the first step.

The forward passes run in slices and are kept in the stage's progress, so that a kill costs one slice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from alignment_core.errors import NumericError
from alignment_core.files import write_whole
from alignment_core.losses.logprobs import sum_by_sequence
from alignment_core.models.microbatch import MicroBatch, Row
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.training.batches import cut, pack
from alignment_core.training.ranks import agree, sum_over_ranks

FILE = "reference_logps.npz"


class ReferenceLogps:
    """Summed log-probabilities in nats: for each split ``[2 * (highest row number + 1)]`` float32, chosen and rejected side
    by side, known for the split's rows.

    The same on every rank. What a file in ``progress`` holds of them is not computed again.
    """

    def __init__(
        self, splits: Mapping[str, Sequence[Row]], progress: Path, rank: int, world: int, budget: int, share: bool
    ) -> None:
        self.file, self.rank = progress / FILE, rank
        sizes = {name: 2 * max((row.number + 1 for row in rows), default=0) for name, rows in splits.items()}
        self.values = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
        self.known = {name: np.zeros(size, bool) for name, size in sizes.items()}
        if self.file.is_file():
            with np.load(self.file) as stored:
                for name in splits:
                    self.values[name], self.known[name] = stored[name], stored[f"{name}_known"]
        packs = [
            (name, each) for name, rows in splits.items() for each in zip(*cut(rows, world, budget, share), strict=True)
        ]
        self.total = len(packs)
        self.left = [(name, each) for name, each in packs if not self._knows(name, each)]
        """What is not computed yet: for each forward pass the split, and the rows of every rank."""

    def _knows(self, name: str, packs: Sequence[Sequence[Row]]) -> bool:
        """Whether the packs of all ranks are known: all of them take part in a forward pass, or none."""
        return all(self.known[name][_numbers(rows)].all() for rows in packs)

    def compute(self, model: PackedModel, device: str, seconds: float) -> None:
        """Forward passes until rank 0's clock says that ``seconds`` are over. Raises NumericError for a broken reference."""
        started = time.monotonic()
        fresh = {name: torch.zeros(2, len(values)) for name, values in self.values.items()}  # values, and which
        while self.left:
            name, packs = self.left.pop(0)
            micro = pack(packs[self.rank], device, model.shares)
            with torch.no_grad():
                sums_S = sum_by_sequence(run_packed(model, micro), micro.sequence_K, micro.sequences)
            fresh[name][0, _numbers(micro.rows)] = sums_S.float().cpu()
            fresh[name][1, _numbers(micro.rows)] = 1.0
            if agree(time.monotonic() - started > seconds, device):
                break
        for name, mine in fresh.items():
            values, which = sum_over_ranks(mine.to(device)).cpu().numpy()
            found = which > 0
            if not np.isfinite(values[found]).all():
                row = np.flatnonzero(found & ~np.isfinite(values))[0] // 2
                raise NumericError(f"the reference's log-probability of row {row} of the {name} rows is not finite")
            self.values[name][found], self.known[name][found] = values[found], True
        if self.rank == 0:
            known = {f"{name}_known": which for name, which in self.known.items()}
            write_whole(self.file, lambda file: np.savez(file, allow_pickle=False, **self.values, **known))

    def of(self, name: str, micro: MicroBatch) -> torch.Tensor:
        """``[S]``: the reference's values for the sequences of a pack."""
        assert not self.left, "the forward passes of the reference come before the first step"
        return torch.from_numpy(self.values[name][_numbers(micro.rows)]).to(micro.input_ids.device)


def _numbers(rows: Sequence[Row]) -> np.ndarray:
    """The places of the rows' sequences, two to a row, in the order of a pack."""
    return np.array([2 * row.number + side for row in rows for side in (0, 1)], dtype=np.int64)
