"""Joint decisions of ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from alignment_core.training.collectives import agree, unanimous


def _rank(rank: int, meet: str, answers: list[bool]) -> None:
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=len(answers))
    assert unanimous(answers[rank], "cpu") == (len(set(answers)) == 1)
    assert agree(answers[rank], "cpu") == answers[0]
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("answers", [[True, True], [False, True]], ids=str)
def test_ranks_know_whether_their_flags_agree_and_rank_0_decides(
    answers: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_indextoname(1))  # loopback
    multiprocessing.spawn(_rank, (f"file://{tmp_path}/meet", answers), nprocs=len(answers))
