"""A frozen linear layer in 8 bits: each row of its weights is stored as int8 times a scale.

This is how LLM.int8() stores weights (Dettmers et al. 2022). It rounds inputs, too, in order to multiply integers. Here only
weights are rounded, so that the trained model is the one that engines and saved models have with the dequantized weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch
from torch import Tensor


class Int8Linear(bitsandbytes.nn.Linear8bitLt):
    """``bitsandbytes``' layer, which PEFT knows, with another forward pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantize ``weight`` [out, in], which is on the CPU; the layer computes in its type."""
        super().__init__(*reversed(weight.shape), bias is not None, has_fp16_weights=False, device="meta")
        self.compute_dtype = weight.dtype
        self.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cpu")
        self.weight.CB = None  # the same numbers again
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self.weight.data, self.weight.SCB, self.bias)
        return product

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the layer; ``torch`` moves the integers alone."""
        super()._apply(fn, recurse)
        self.weight.SCB = self.weight.SCB.to(self.weight.device)
        self.weight.CB = None
        return self


class _Product(torch.autograd.Function):
    """x Wᵀ + b with frozen W and b. The backward pass dequantizes W again, because keeping it would take its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, integers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(integers, scales)
        return torch.nn.functional.linear(x, dequantised(integers, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        [grad] = grads
        integers, scales = ctx.saved_tensors
        return grad @ dequantised(integers, scales, grad.dtype), None, None, None


def dequantised(integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """``integers`` [out, in] from -127 to 127 times ``scales`` / 127 [out]; a scale is its row's largest absolute value."""
    return integers.to(dtype).mul_((scales / 127)[:, None])
