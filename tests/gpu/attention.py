"""Attention over prefix trees, as the device computes it (compiled FlexAttention on a GPU), against the eager attention of
``transformers``, which computes each sequence alone with a mask."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch

from alignment_core.models.microbatch import Row, pack
from alignment_core.models.packed import PackedModel, run_packed
from tests.gpu.report import CannotRun
from tests.gpu.size import grouped_rows, new_model, relative, size_on, the_device

MOST = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Greatest relative error, by type: FlexAttention may multiply fp32 in TF32."""
COMPARED = ("log-probabilities", "gradients of values", "gradients of queries")


def run(kind: str) -> dict[str, Any]:
    """Trees in fp32 and bf16."""
    return _compared(kind, "trees", (torch.float32, torch.bfloat16))


def run_flash(kind: str) -> dict[str, Any]:
    """Packed lines by the package flash-attn, in bf16."""
    if kind == "cpu" or importlib.util.find_spec("flash_attn") is None:
        raise CannotRun("the package flash-attn is not installed" if kind == "cuda" else "flash-attn needs a GPU")
    return _compared(kind, "flash", (torch.bfloat16,))


def _compared(kind: str, way: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    device, size = the_device(kind).torch_device, size_on(kind)
    rows, figures = grouped_rows(size), dict[str, Any]()
    plain = new_model(size, torch.float32).to(device)  # the weights of those in bf16
    plain.set_attn_implementation("eager")
    expected = _of_transformers(plain, rows)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        model = new_model(size, dtype).to(device)
        packed = PackedModel(
            model, "lm", share_prefixes=way == "trees", device=device, dtype=dtype, flash=way == "flash"
        )
        assert packed.shares_prefixes == (way == "trees"), f"in {name} prefix trees do not run: see the log"
        seconds = []
        for _ in range(3):  # the first pass compiles
            model.zero_grad()
            started = _now(device)
            result = _of_ours(packed, rows, device)
            seconds.append(_now(device) - started)
        errors = [relative(ours, theirs) for ours, theirs in zip(result, expected, strict=True)]
        for of, error in zip(COMPARED, errors, strict=True):
            figures[f"error of {of}, {name}"] = error
        figures[f"first pass, {name}, s"], figures[f"pass, {name}, s"] = seconds[0], seconds[-1]
        assert max(errors) <= MOST[dtype], f"in {name} it differs by {max(errors):.2g} from eager attention"
    return figures


def _of_ours(packed: PackedModel, rows: list[Row], device: str) -> list[torch.Tensor]:
    """What is compared; the gradients are those of the sum of all log-probabilities."""
    logps = run_packed(packed, pack(rows, device, packed.shares_prefixes))
    logps.sum().backward()
    return [logps.detach(), *_gradients(packed.model)]


def _gradients(model: Any) -> list[torch.Tensor]:
    attention = model.model.layers[0].self_attn
    return [attention.v_proj.weight.grad, attention.q_proj.weight.grad]


def _of_transformers(model: Any, rows: list[Row]) -> list[torch.Tensor]:
    of_rows = []
    for row in rows:
        (sequence,) = row.sequences
        ids = torch.from_numpy(sequence.ids).to(model.device)
        logps = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = logps.gather(1, ids[1:, None])[:, 0][torch.from_numpy(sequence.targets[1:]).to(model.device)]
        chosen.sum().backward()
        of_rows.append(chosen.detach())
    return [torch.cat(of_rows), *_gradients(model)]


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
