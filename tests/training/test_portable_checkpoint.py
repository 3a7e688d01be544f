"""Checkpoints for other machines: the same ranks resume to the same bytes, others to the same weights up to rounding, and
they contain no pickles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from alignment_core.artifacts.stored_progress import PLAIN, settled
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.sft import Sft
from alignment_core.training.portable_checkpoint import Portable, _Part
from alignment_core.training.resumable import save_progress
from tests.matrix import cases, matrix
from tests.training.test_policy_ranks import Policy, sampled
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train

STORED: dict[str, Any] = {"progress": "store"}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"zero_stage": 0}),
    (2, {"zero_stage": 0}),
    (2, {"zero_stage": 1}),
    (2, {"zero_stage": 2}),
    (2, {"zero_stage": 3}),
    (2, {"zero_stage": 2, "offload_optimizer": True}),
]


@pytest.mark.parametrize(
    ("layout", "bf16"),
    matrix(range(len(LAYOUTS)), [False, True], usual=[(0, True), (2, False), (4, False), (4, True), (5, True)]),
)
def test_the_same_ranks_resume_to_the_same_bytes(
    layout: int, bf16: bool, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    ranks_of, resources = LAYOUTS[layout]
    job = make_job(Dpo(DpoLossConfig(beta=0.3)), bf16=bf16)
    with machines(ranks_of).trainers() as group:
        ranks = open_job(group, machines(ranks_of), job, tmp_path / "progress", **STORED, **resources)
        train(ranks, 3)
        save_progress([ranks], tmp_path / "progress")
        assert {Path(path).suffix for path in settled(tmp_path / "progress")} <= PLAIN
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks, state = opened(group, machines(ranks_of), job, tmp_path / "progress", **STORED, **resources)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole


@pytest.mark.parametrize(("before", "after"), cases([(0, 3), (4, 1), (3, 5), (2, 4)], usual=[(0, 3), (4, 1)]))
def test_other_ranks_and_stages_resume_to_the_same_weights_up_to_rounding(
    before: int, after: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(Sft())
    results = {}
    for name, layout in (("whole", before), ("resumed", after)):
        ranks_of, resources = LAYOUTS[layout]
        with machines(ranks_of).trainers() as group:
            ranks, state = opened(group, machines(ranks_of), job, tmp_path / "progress", **STORED, **resources)
            if name == "whole":
                train(ranks, 3)
                save_progress([ranks], tmp_path / "progress")
            else:
                assert state["step"] == 3
            train(ranks, 3)
            results[name] = load_file(export(ranks, tmp_path / name))
    start = load_file(job.model.path / "model.safetensors")
    moved = greatest_difference({name: start[name] for name in results["whole"]}, results["whole"])
    assert greatest_difference(results["whole"], results["resumed"]) < 1e-3 * moved


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_ranks_write_about_as_much_each(zero_stage: int, make_job: Any, machines: Any, tmp_path: Path) -> None:
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), make_job(Sft()), tmp_path / "progress", zero_stage=zero_stage, **STORED)
        train(ranks, 1)
        save_progress([ranks], tmp_path / "progress")
    first, second = sorted((tmp_path / "progress").rglob("portable-*.safetensors"))
    assert {*load_file(first)}.isdisjoint(load_file(second))
    largest = max(tensor.nbytes for tensor in load_file(first).values())
    assert abs(first.stat().st_size - second.stat().st_size) <= 2 * largest


@pytest.mark.parametrize("has_part", [True, False])
def test_parts_are_added_up_on_the_device_of_the_engine(has_part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offloaded optimiser has its part in CPU memory, of which NCCL sums no tensors. The meta device stands for a GPU."""
    part = _Part(torch.ones(6), start=2, at=1, size=3) if has_part else None
    portable: Any = object.__new__(Portable)
    portable.engine = SimpleNamespace(device=torch.device("meta"))
    portable.zero_stage = 2
    portable._peers = None
    portable._part = lambda _: part
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: summed.append(tensor))
    whole = portable._of_peers(torch.nn.Parameter(torch.zeros(2, 4)), "weights")
    assert [tensor.device.type for tensor in summed] == ["meta"]
    assert (whole.device.type, whole.shape, whole.dtype) == ("meta", (2, 4), torch.float32)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_every_optimiser_resumes_to_the_same_bytes(name: str, make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(Sft(), optimizer=name)
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, tmp_path / "progress", zero_stage=0, **STORED)
        train(ranks, 3)
        save_progress([ranks], tmp_path / "progress")
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks = open_job(group, machines(1), job, tmp_path / "progress", zero_stage=0, **STORED)
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole


@pytest.mark.parametrize(("before", "after"), cases([(2, 2), (3, 3), (0, 3)], usual=[(0, 3)]))
def test_the_moving_average_of_the_weights_resumes(
    before: int, after: int, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    section = {"ema": {"decay": 0.75}, "training": {"bf16": False}}
    with machines(2).trainers() as group:
        policy = Policy(group, machines(2), tiny_model(), tmp_path / "run", section, zero_stage=before, **STORED)
        policy.open()
        policy.learn(sampled())
        policy.save()
        policy.learn(sampled())
        expected = policy.export("average")
        policy.resources = policy.resources.model_copy(update={"zero_stage": after})
        assert policy.open() == 1
        policy.learn(sampled())
        resumed = policy.export("average")
    if before == after:
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    else:
        assert greatest_difference(resumed, expected) < 1e-5
