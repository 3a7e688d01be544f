"""The trainer on real DeepSpeed ranks: the result depends on the job alone, resumes exactly, and fails on all ranks."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import DataError, EnvironmentFault, NumericError, UserError
from alignment_core.host.protocol import describe, rebuild
from alignment_core.models.model_ref import Model
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.checkpoints import newest_progress
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.dpo_beta import DynamicDpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.rank_folders import write
from alignment_core.training.ranks import TrainerActors
from alignment_core.training.ranks import open_job as open_on
from alignment_core.training.resumable import resume, save_progress
from alignment_core.training.step_report import StepReport
from alignment_core.training.trainer import Trainer, TrainJob
from alignment_core.training.training_rows import batch_of_step
from tests.matrix import cases, matrix
from tests.training.conftest import MODEL, reference_logps

DPO = Dpo(DpoLossConfig(beta=0.3, nll_weight=0.2))
CHANGING = DynamicDpo(DpoLossConfig(beta=0.3, final_beta=0.6, beta_alpha=0.6, beta_margin=1.0))


Ranks = ActorGroup[Trainer]


def opened(
    trainers: TrainerActors, machines: Any, job: TrainJob, folder: Path, **resources: Any
) -> tuple[Ranks, dict[str, Any]]:
    """A job on the ranks, continued from its progress, and where it stands."""
    folder.mkdir(exist_ok=True)
    ranks = open_on(trainers, job, machines.resources.model_copy(update=resources))
    return ranks, resume([ranks], folder)


def open_job(trainers: TrainerActors, machines: Any, job: TrainJob, folder: Path, **resources: Any) -> Ranks:
    return opened(trainers, machines, job, folder, **resources)[0]


def train(ranks: Ranks, steps: int) -> list[StepReport]:
    return ranks.all(Trainer.train, steps, 3600.0)


def export(ranks: Ranks, directory: Path) -> Path:
    write(ranks, [directory], Trainer.export, directory)
    return directory / "model.safetensors"


def trained(machines: Any, job: TrainJob, output: Path, steps: int = 3, **resources: Any) -> dict[str, torch.Tensor]:
    """The weights after so many steps of a new job."""
    with machines.trainers() as group:
        ranks = open_job(group, machines, job, output.with_suffix(".progress"), **resources)
        assert [report.steps for report in train(ranks, steps)] == [steps] * ranks.size
        return load_file(export(ranks, output))


def greatest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(
    "method", [Sft(), RewardModel(), DPO, CHANGING], ids=["sft", "reward model", "dpo", "dpo, β of each batch"]
)
def test_ranks_and_micro_batches_do_not_change_the_trained_weights(
    method: Any, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(method)
    before = load_file(job.model.path / "model.safetensors")
    single = trained(machines(1), job, tmp_path / "one")
    assert (
        max(float((single[name] - before[name]).abs().max()) for name in before if name in single) > 1e-3
    )  # it did train
    assert greatest_difference(single, trained(machines(1), job, tmp_path / "cut", max_tokens_per_microbatch=64)) < 1e-5
    assert greatest_difference(single, trained(machines(2), job, tmp_path / "two")) < 1e-5
    both = trained(machines(2), job, tmp_path / "both", max_tokens_per_microbatch=32)
    assert greatest_difference(single, both) < 1e-5


@pytest.mark.parametrize(
    ("zero_stage", "offload"),
    cases([(0, False), (2, False), (3, False), (2, True), (3, True)], usual=[(0, False), (2, False), (3, True)]),
)
def test_every_zero_stage_trains_the_same_weights(
    zero_stage: int, offload: bool, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(DPO)
    single = trained(machines(1), job, tmp_path / "one")
    wanted = {"zero_stage": zero_stage, "offload_optimizer": offload, "max_tokens_per_microbatch": 64}
    two = trained(machines(2), job, tmp_path / "two", **wanted)
    assert greatest_difference(single, two) < 1e-5


def test_further_options_of_deepspeed_are_taken_or_refused(make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(Sft())
    single = trained(machines(1), job, tmp_path / "one")
    taken = {"zero_optimization": {"offload_param": {"device": "cpu"}, "reduce_bucket_size": 10_000}}
    assert (
        greatest_difference(single, trained(machines(2), job, tmp_path / "two", zero_stage=3, deepspeed=taken)) < 1e-5
    )
    for options, says in (
        ({"wall_clock_brakdown": True}, r"resources\.deepspeed\.wall_clock_brakdown: DeepSpeed has no such option"),
        (
            {"zero_optimization": {"bucket": 1}},
            r"resources\.deepspeed: DeepSpeed refuses it: bucket: Extra inputs are not permitted",
        ),
    ):
        with machines(1).trainers() as group, pytest.raises(UserError, match=says):
            open_job(group, machines(1), job, tmp_path / "progress", deepspeed=options)


def test_a_finished_job_leaves_nothing_in_memory(make_job: Any, machines: Any, tmp_path: Path) -> None:
    def remember(actor: Any) -> None:
        learner = actor.object.learner
        actor.remembered = [weakref.ref(owner) for owner in (learner.engine, *learner.packed.parameters())]

    jobs = [(DPO, 2), (Sft(), 3), (RewardModel(), 3), (Sft(), 0)]
    for number, (method, zero_stage) in enumerate(jobs):
        with machines(1).trainers() as group:
            ranks = open_job(group, machines(1), make_job(method), tmp_path / str(number), zero_stage=zero_stage)
            train(ranks, 3)
            (actor,) = machines(1).actors.trainers.actors
            machines(1).actors.ray.get(actor.__ray_call__.remote(remember))
        left = actor.__ray_call__.remote(lambda actor: sum(reference() is not None for reference in actor.remembered))
        assert machines(1).actors.ray.get(left) == 0, f"of the job number {number}"


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_weight_decay_spares_norms_and_embeddings_under_every_sharding(
    zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    before = load_file(make_job(Sft()).model.path / "model.safetensors")
    weights = []
    for decay in (0.0, 50.0):
        job = make_job(Sft(), weight_decay=decay, lr_scheduler_type="constant")
        weights.append(trained(machines(2), job, tmp_path / str(decay), steps=1, zero_stage=zero_stage))
    without, decayed = weights
    for name, weight in before.items():
        # AdamW's first step is W (1 - learning rate · decay) and, for any decay, Adam's own part: here 0.95 W.
        lost = 0.05 * weight if "proj" in name else torch.zeros_like(weight)
        torch.testing.assert_close(without[name] - decayed[name], lost, rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero_stage", matrix([0, 1, 2, 3], usual=[1, 3]))
def test_bf16_trains_as_fp32_does_up_to_its_rounding(
    zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(Sft())
    before = load_file(job.model.path / "model.safetensors")
    exact = trained(machines(1), job, tmp_path / "fp32")
    rough = trained(machines(2), make_job(Sft(), bf16=True), tmp_path / "bf16", zero_stage=zero_stage)
    assert {tensor.dtype for tensor in rough.values()} == {torch.bfloat16}
    rough = {name: tensor.float() for name, tensor in rough.items()}
    moved = torch.cat([(exact[name] - before[name]).flatten() for name in exact])
    moved_roughly = torch.cat([(rough[name] - before[name].bfloat16().float()).flatten() for name in exact])
    assert torch.nn.functional.cosine_similarity(moved, moved_roughly, dim=0) > 0.9


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_the_reported_loss_and_norm_do_not_depend_on_ranks_or_sharding(
    zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(Sft())
    losses, norms = [], []
    for world, stage in ((1, None), (2, zero_stage)):
        with machines(world).trainers() as group:
            ranks = open_job(group, machines(world), job, tmp_path / str(world), zero_stage=stage)
            reports = train(ranks, 2)
            held_out = ranks.all(Trainer.evaluate)
            losses.append(
                [
                    sum(report.sums["loss"] for report in part) / sum(report.normaliser for report in part)
                    for part in (reports, held_out)
                ]
            )
            norms.append({report.grad_norm for report in reports})
            assert len(norms[-1]) == 1  # of all ranks together, so the same on each
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0].pop() == pytest.approx(norms[1].pop(), rel=1e-4)


def test_a_job_uses_reference_logps_of_its_rows_and_refuses_rows_without_them(
    make_job: Any, tables: Any, machines: Any, tmp_path: Path
) -> None:
    pairs, settings = tables["preference"], dict[str, Any](lr_scheduler_type="constant")
    all_rows = trained(machines(1), make_job(DPO, **settings), tmp_path / "all", steps=2)
    taken = sorted({row for step in range(2) for row in batch_of_step(step, 14, 6, seed=3)})
    assert len(taken) == 12, "of 14"
    settings["logps"] = reference_logps(tmp_path / "few.parquet", pairs, train=taken)
    few = trained(machines(1), make_job(DPO, **settings, max_steps=2), tmp_path / "few", steps=2)
    assert greatest_difference(all_rows, few) == 0

    missing, _ = sorted({*range(14)} - {*taken})
    says = rf"are missing for 2 of the 14 train rows that are used, the first of them row {missing}: they are those of"
    with machines(2).trainers() as group, pytest.raises(DataError, match=says):
        open_job(group, machines(2), make_job(DPO, **settings), tmp_path / "progress")
    settings["logps"] = reference_logps(tmp_path / "no-test.parquet", pairs, test=())
    with machines(1).trainers() as group, pytest.raises(DataError, match="are missing for 14 of the 14 test rows"):
        open_job(group, machines(1), make_job(DPO, **settings), tmp_path / "progress")


@pytest.mark.parametrize("offload", [False, True])
def test_a_resumed_job_ends_in_the_same_bytes(offload: bool, make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(DPO)
    progress = tmp_path / "progress"
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, progress, offload_optimizer=offload)
        train(ranks, 3)
        save_progress([ranks], progress)  # during the run, which continues to its end
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()

        ranks, state = opened(group, machines(2), job, progress, offload_optimizer=offload)
        assert state["step"] == 3
        assert [report.steps for report in train(ranks, 100)] == [3, 3]
        resumed = export(ranks, tmp_path / "resumed").read_bytes()
    assert resumed == whole


def test_after_a_failure_new_processes_resume_to_the_same_bytes(make_job: Any, machines: Any, tmp_path: Path) -> None:
    job, progress = make_job(DPO), tmp_path / "progress"
    with machines(2).trainers() as old:
        ranks = open_job(old, machines(2), job, tmp_path / "whole.progress")
        train(ranks, 6)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks = open_job(old, machines(2), job, progress)
        train(ranks, 3)
        save_progress([ranks], progress)
    shutil.copytree(job.model.path, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"none")
    without_model = dataclasses.replace(job, model=Model(tmp_path / "broken", MODEL))
    with pytest.raises(RuntimeError, match="`open` failed"), machines(2).trainers() as old:
        open_job(old, machines(2), without_model, progress)
    with machines(2).trainers() as new:
        assert new.group is not old.group
        ranks, state = opened(new, machines(2), job, progress)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole


def test_only_a_complete_checkpoint_counts_and_other_layouts_do_not_start_over(
    make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job, progress = make_job(Sft()), tmp_path / "progress"
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, progress)
        for _ in range(2):
            train(ranks, 1)
            save_progress([ranks], progress)
        assert newest_progress(progress) == progress / "step-00000002"

        (progress / "step-00000002" / "complete.json").unlink()  # as if killed while it was written
        ranks, state = opened(group, machines(2), job, progress)
        assert state["step"] == 1
        written = (progress / "step-00000001" / "complete.json").stat()
        save_progress([ranks], progress)  # nothing new: the only good one is not touched
        assert (progress / "step-00000001" / "complete.json").stat() == written
        says = (
            r"^the checkpoint of step 1 is of `trainers: 2`, `zero_stage: 1` and `offload_optimizer: false`, and cannot be "
            r"read with `trainers: 2`, `zero_stage: 2` and `offload_optimizer: false`: set these resources as they were "
        )
        with pytest.raises(UserError, match=says):
            opened(group, machines(2), job, progress, zero_stage=2)
        with pytest.raises(UserError, match="cannot be read with `progress: store`: set"):
            opened(group, machines(2), job, progress, progress="store")
        assert opened(group, machines(2), job, progress)[1]["step"] == 1, "nothing is lost"


def errors_of_ranks(ranks: Ranks, steps: int) -> list[BaseException | None]:
    """The error of `train` on each rank; fails if a rank does not answer."""
    calls = [actor.call.remote(call(Trainer.train, steps, 3600.0)) for actor in ranks.actors]
    _, hanging = ranks.ray.wait(calls, num_returns=len(calls), timeout=60)
    assert not hanging
    errors: list[BaseException | None] = []
    for arguments in calls:
        try:
            ranks.ray.get(arguments)
            errors.append(None)
        except ranks.ray.exceptions.RayTaskError as error:
            errors.append(error.cause)
    return errors


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_diverging_job_is_a_numeric_error_on_every_rank(
    zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(Sft(), learning_rate=1e30)
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, tmp_path / "progress", zero_stage=zero_stage)
        errors = errors_of_ranks(ranks, 6)
        assert [type(error) for error in errors] == [NumericError, NumericError]
        assert "is not finite at step 1 of 6" in str(errors[0])  # step 0 made the weights as large as the rate
        for save in (lambda ranks, folder: save_progress([ranks], folder), export):
            with pytest.raises(NumericError, match=r"step 1 failed half-way: the half-updated weights are not saved"):
                save(ranks, tmp_path / "bad")
        assert not (tmp_path / "bad").exists()

        # all ranks left the step together, so the actors serve the next job
        ranks = open_job(group, machines(2), make_job(Sft()), tmp_path / "next")
        assert [report.steps for report in train(ranks, 1)] == [1, 1]


def test_a_loss_that_overflows_on_one_rank_is_an_error_on_both(
    make_job: Any, machines: Any, tables: Any, tmp_path: Path
) -> None:
    # An infinite margin makes the loss of its pair infinite while the gradient stays finite (σ saturates at 1): only
    # the rank that holds the pair sees it.
    margins = np.zeros(14, np.float32)
    margins[0] = np.inf
    table = tables["preference"]
    table = table.set_column(table.schema.get_field_index("margin"), "margin", pa.array(margins))
    job = make_job(RewardModel(), table=table, batch_size=14)
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, tmp_path / "progress")
        errors = errors_of_ranks(ranks, 1)
    assert [type(error) for error in errors] == [NumericError, NumericError]


@pytest.mark.parametrize(
    ("bytes_per_parameter", "says"),
    [(10, r"the checkpoint of step 1 needs 1\.\d MiB in .*: the disk is full; free space"), (13, "the disk is full")],
    ids=["foreseen", "met while writing"],
)
def test_a_checkpoint_larger_than_the_disk_is_refused_in_a_sentence_and_does_not_count(
    bytes_per_parameter: int, says: str, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        group = stack.enter_context(machines(1).trainers())
        ranks, state = opened(group, machines(1), make_job(Sft()), tmp_path / "progress")
        parameters = state["parameters"]
        options = f"size={bytes_per_parameter * parameters}"  # this one takes 16 a parameter
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], capture_output=True, check=False)
        if mount.returncode:
            pytest.skip("mounting a small file system takes root")
        stack.callback(lambda: subprocess.run(["umount", disk], check=True))
        train(ranks, 1)
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 3 * parameters))
        with pytest.raises(EnvironmentFault, match=r"the model of step 1 needs 0\.\d MiB in .*: the disk is full"):
            export(ranks, disk / "model")
        (disk / "other").unlink()
        with pytest.raises(Exception) as caught:  # noqa: PT011 (what the flow would see of it is what counts)
            save_progress([ranks], disk)
        error = rebuild(describe(caught.value))
        assert isinstance(error, EnvironmentFault)
        assert re.search(says, str(error))
        assert newest_progress(disk) is None

        subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
        save_progress([ranks], disk)
        assert newest_progress(disk) == disk / "step-00000001"


def test_rank_zero_stops_all_ranks_when_its_time_is_over(make_job: Any, machines: Any, tmp_path: Path) -> None:
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), make_job(Sft()), tmp_path / "progress")
        assert [report.steps for report in ranks.all(Trainer.train, 6, 0.0)] == [1, 1]
