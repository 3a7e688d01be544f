"""fp32 master weights carry changes from round to round that bf16 rounds away.

All norm weights of the initial model are 1. AdamW's first step moves a weight by the learning rate, whatever its gradient g:
g / (|g| + ε), with an ε far below |g|. Beside 1 the next numbers of bf16 are 1 + 2⁻⁷ and 1 - 2⁻⁸, so a round of one step of
1.5e-3 is rounded away (2⁻⁹ = 1.95e-3), and the second round in the same direction, downwards, is not (3e-3).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from alignment_core.artifacts.reference import MASTERS
from alignment_core.errors import UserError
from alignment_core.models.model_ref import Model
from alignment_core.training.methods.sft import Sft
from alignment_core.training.rank_folders import write
from alignment_core.training.trainer import Trainer, TrainJob
from tests.training.conftest import MODEL
from tests.training.test_trainer_ranks import export, open_job, train

RATE = 1.5e-3
NORM = "model.norm.weight"
LAYOUTS = [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]


def one_step(
    group: Any, machines: Any, job: TrainJob, output: Path, zero_stage: int, **resources: Any
) -> dict[str, torch.Tensor]:
    """The weights as they are exported after a round of one step."""
    ranks = open_job(group, machines, job, output.with_suffix(".progress"), zero_stage=zero_stage, **resources)
    train(ranks, 1)
    return load_file(export(ranks, output))


def masters_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted((folder / MASTERS).iterdir()):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name.removeprefix("weights.model."): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def next_round(job: TrainJob, start: Path, masters: bool) -> TrainJob:
    return dataclasses.replace(job, model=Model(start, MODEL), masters=start / MASTERS if masters else None)


@pytest.mark.parametrize(("trainers", "zero_stage"), LAYOUTS)
def test_two_rounds_are_the_same_as_in_fp32_up_to_the_rounding_of_the_last(
    trainers: int, zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    settings = {"learning_rate": RATE, "lr_scheduler_type": "constant", "adam_epsilon": 1e-15}
    in_fp32 = make_job(Sft(), **settings)
    job = dataclasses.replace(make_job(Sft(), bf16=True, **settings), saves_masters=True)
    results = {}
    with machines(trainers).trainers() as group:
        for name, of_round in (
            ("first", job),
            ("second", next_round(job, tmp_path / "first", masters=True)),
            ("without", next_round(job, tmp_path / "first", masters=False)),
            ("fp32-first", in_fp32),
            ("fp32-second", next_round(in_fp32, tmp_path / "fp32-first", masters=False)),
        ):
            results[name] = one_step(group, machines(trainers), of_round, tmp_path / name, zero_stage)
    first, second, without = (masters_in(tmp_path / name) for name in ("first", "second", "without"))
    assert torch.equal(results["first"][NORM], torch.ones_like(results["first"][NORM]))
    assert (first[NORM] - 1).abs().allclose(torch.tensor(RATE), rtol=1e-3)
    assert (second[NORM] - first[NORM]).abs().allclose(torch.tensor(RATE), rtol=1e-3)
    down = second[NORM] < 1 - 1.9 * RATE
    assert down.any()
    assert not down.all()
    assert torch.equal(results["second"][NORM], torch.where(down, 1 - 2**-8, 1.0).bfloat16())
    assert torch.equal(results["without"][NORM], torch.ones_like(results["without"][NORM]))
    assert (without[NORM] - 1).abs().allclose(torch.tensor(RATE), rtol=1e-3)
    for masters, exported in ((first, results["first"]), (second, results["second"])):
        assert exported.keys() <= masters.keys()
        assert all(torch.equal(masters[name].bfloat16(), exported[name]) for name in exported)
    # A gradient that is nearly zero in fp32 may have another sign in bf16.
    same = [(results["fp32-second"][name].bfloat16() == results["second"][name]).float() for name in (NORM,)]
    assert all(part.mean() > 0.9 for part in same)
    assert not (tmp_path / "fp32-first" / MASTERS).exists()


@pytest.mark.parametrize(("trainers", "zero_stage"), [(1, 0), (2, 1), (2, 3)])
def test_masters_of_another_policy_are_refused_and_named(
    trainers: int, zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """As in a folder that a stage copied, with `masters.json`, before it changed some of its weights."""
    job = dataclasses.replace(make_job(Sft(), bf16=True, learning_rate=RATE), saves_masters=True)
    with machines(trainers).trainers() as group:
        weights = one_step(group, machines(trainers), job, tmp_path / "first", zero_stage)
        weights[NORM][3] += 2**-7  # to the next number of bf16
        save_file(weights, tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
        says = rf"master weights of another policy \({NORM} is not its master weight.*keep_master_weights: false"
        with pytest.raises(UserError, match=says):
            one_step(
                group, machines(trainers), next_round(job, tmp_path / "first", True), tmp_path / "next", zero_stage
            )
        (file,) = (tmp_path / "first" / MASTERS).iterdir()
        save_file({name: tensor for name, tensor in load_file(file).items() if NORM not in name}, file)
        weights[NORM][3] -= 2**-7
        save_file(weights, tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=rf"master weights of another policy \({NORM} is not"):
            one_step(
                group, machines(trainers), next_round(job, tmp_path / "first", True), tmp_path / "next", zero_stage
            )


def test_a_model_of_an_earlier_step_is_written_without_master_weights(
    make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """Not even for a moment: they take twice its space on the disk."""
    job = dataclasses.replace(make_job(Sft(), bf16=True), saves_masters=True)
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, tmp_path / "progress")
        write(ranks, [tmp_path / "model"], Trainer.export, tmp_path / "model", False)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert not [path for path in (tmp_path / "model").iterdir() if path.is_dir()]
