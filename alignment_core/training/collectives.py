"""Collectives beside those of gradients, so that all trainer ranks make the same decisions."""

from __future__ import annotations

import torch


def agree(flag: bool, device: str) -> bool:
    """Rank 0's flag, on every rank."""
    if torch.distributed.get_world_size() == 1:
        return flag
    answer = torch.tensor([int(flag)], device=device)
    torch.distributed.broadcast(answer, 0)
    return bool(answer.item())


def from_rank_0(text: str | None, device: str) -> str | None:
    """Rank 0's text, on every rank."""
    texts = [text]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(texts, 0, device=torch.device(device))
    return texts[0]


def unanimous(flag: bool, device: str) -> bool:
    """Whether all ranks have the same flag."""
    counts = sum_over_ranks(torch.tensor([int(flag), 1], device=device))
    return int(counts[0]) in (0, int(counts[1]))


def sum_over_ranks(values: torch.Tensor, counts: bool = True) -> torch.Tensor:
    """The same sums on every rank, on the device of ``values``. They leave out the ranks that do not count, because another
    one has the same values."""
    if not counts:
        values = torch.zeros_like(values)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(values)
    return values
