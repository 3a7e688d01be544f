"""Recognising failed allocations, which a smaller micro-batch may avoid."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from alignment_core.errors import GpuOccupied, OutOfMemory
from alignment_core.machine_memory import GIB

SIGNS = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")
"""Texts in the errors of PyTorch's allocators (CPU, CUDA), cuBLAS and oneDNN."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )


@contextmanager
def memory_explained(tokens: int) -> Iterator[None]:
    """Turn a failed allocation inside the block, which works on micro-batches of ``tokens``, into OutOfMemory; where other
    processes hold more than half of the GPU's memory, into GpuOccupied."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        reason = next((line for line in str(error).splitlines() if any(sign in line for sign in SIGNS)), "MemoryError")
        of_others = _of_others() if _is_of_gpu(error) else ""
        kind = GpuOccupied if of_others else OutOfMemory
        raise kind(
            f"out of memory with micro-batches of {tokens} tokens (resources.max_tokens_per_microbatch){of_others}: "
            f"{reason.strip()}"
        ) from error


def _is_of_gpu(error: BaseException) -> bool:
    """Whether it was an allocation on a GPU, by its text."""
    return any(name in str(error) for name in ("CUDA", "CUBLAS"))


def _of_others() -> str:
    """How much of this process's GPU other processes hold, if that is more than half of its memory."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after some errors CUDA does not even answer that
        return ""
    own = torch.cuda.memory_reserved()
    others = total - free - own
    if others <= total // 2:
        return ""
    return (
        f", beside other processes, such as an engine, that hold {others / GIB:.1f} of the GPU's {total / GIB:.1f} GiB "
        "(resources.gpu_memory_utilization)"
    )
