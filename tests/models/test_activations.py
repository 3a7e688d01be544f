"""Which operations the backward pass computes again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from alignment_core.models.activations import Recomputed, recompute
from alignment_core.models.microbatch import pack
from alignment_core.models.packed import PackedModel, run_packed
from tests.models.test_attention import TINY, model_of, rows_of, trees


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.counts[function.name().removeprefix("aten::").partition(".")[0]] += 1
        return function(*arguments, **(options or {}))


def counted(what: Recomputed | None, architecture: str, **more: Any) -> Counter[str]:
    """Operations of a forward and a backward pass."""
    model = model_of(architecture, **more)
    if what:
        recompute(model, what)
    packed = PackedModel(model, "lm").train()
    micro = pack(rows_of(trees(np.random.default_rng(0))), share_prefixes=packed.shares_prefixes)
    with Operations() as operations:
        run_packed(packed, micro).sum().backward()
    return operations.counts


@pytest.mark.parametrize(("architecture", "more"), [("llama", {}), ("mistral", {"sliding_window": 8}), ("qwen2", {})])
def test_selective_recomputes_neither_matrix_products_nor_attention(architecture: str, more: dict[str, Any]) -> None:
    """A norm's rsqrt stands for the rest: with two norms in each of two layers and one after them, 5, or 9 with those in the
    layers computed again."""
    plain, selective, every = (counted(what, architecture, **more) for what in (None, "selective", "all"))
    attention = [name for name in plain if "scaled_dot_product" in name or "tree_attention" in name]
    kept = [*attention, *(name for name in plain if name in ("mm", "bmm", "addmm"))]
    assert "mm" in kept
    layers = TINY["num_hidden_layers"]
    shares = not more
    assert shares == ("alignment::tree_attention" in attention)
    assert all(plain[name] == layers for name in attention if not (shares and "backward" in name)), "once in a layer"
    assert [counts["rsqrt"] for counts in (plain, selective, every)] == [2 * layers + 1, 4 * layers + 1, 4 * layers + 1]
    assert {name: selective[name] for name in kept} == {name: plain[name] for name in kept}
    assert every["mm"] > plain["mm"]
