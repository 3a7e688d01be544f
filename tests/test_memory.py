"""A failed allocation is distinguished from other failures, for every allocator."""

from __future__ import annotations

import pytest
import torch

from alignment_core.errors import GpuOccupied, OutOfMemory
from alignment_core.memory import memory_explained


def test_a_refusal_of_the_real_allocator_names_field_and_size() -> None:
    says = (
        r"micro-batches of 512 tokens \(resources\.max_tokens_per_microbatch\): .*can't allocate memory: you tried to"
    )
    with pytest.raises(OutOfMemory, match=says), memory_explained(512):
        torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["Python", "CUDA", "cuBLAS"],
)
def test_errors_of_other_allocators_are_recognised_by_their_message(error: Exception) -> None:
    with pytest.raises(OutOfMemory), memory_explained(512):
        raise error


@pytest.mark.parametrize(("free", "own", "names"), [(2, 20, True), (2, 60, False), (70, 4, False), (8, 34, False)])
def test_the_sentence_names_other_processes_that_hold_most_of_the_gpu(
    free: int, own: int, names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 GiB: others hold 58, 18, 6 or 38. No GPU is there to ask."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own << 30)
    with pytest.raises(OutOfMemory) as raised, memory_explained(512):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    of_others = "such as an engine, that hold 58.0 of the GPU's 80.0 GiB (resources.gpu_memory_utilization): CUDA out"
    assert (of_others in str(raised.value)) is names
    assert type(raised.value) is (GpuOccupied if names else OutOfMemory)


def test_an_allocation_on_the_cpu_is_no_matter_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 << 30)
    with pytest.raises(OutOfMemory) as raised, memory_explained(512):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    assert type(raised.value) is OutOfMemory


def test_errors_other_than_memory_are_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), memory_explained(512):
        raise RuntimeError("shapes differ")
