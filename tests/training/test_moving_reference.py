"""A reference that follows the policy of DPO while that trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.errors import UserError
from alignment_core.models.model_ref import Model
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.dpo_beta import DynamicDpo
from alignment_core.training.moving_reference import REFERENCE
from alignment_core.training.resumable import save_progress
from alignment_core.training.trainer import Trainer
from tests.matrix import cases
from tests.training.conftest import MODEL, portable
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train, trained

pytestmark = pytest.mark.slow

DPO = Dpo(DpoLossConfig(beta=0.3))
CHANGING = DynamicDpo(DpoLossConfig(beta=0.3, beta_alpha=0.6))


def following(job: Any, mixup_alpha: float, sync_steps: int) -> Any:
    sync = ReferenceSyncConfig(mixup_alpha=mixup_alpha, sync_steps=sync_steps)
    return replace(job, sync=sync, reference_logps=None)


def test_the_reference_is_mixed_with_the_policy_at_its_interval(make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = following(make_job(DPO), 0.25, 2)
    expected = load_file(job.model.path / "model.safetensors")
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, tmp_path / "progress")
        for step in range(1, 5):
            train(ranks, 1)
            policy = load_file(export(ranks, tmp_path / f"step-{step}"))
            if step % 2 == 0:
                expected = {name: torch.lerp(weight, policy[name], 0.25) for name, weight in expected.items()}
        save_progress([ranks], tmp_path / "progress")
    saved = load_file(tmp_path / "progress" / "step-00000004" / REFERENCE)
    assert all(torch.equal(saved[f"{name}"], expected[name]) for name in saved)
    assert len(saved) == len(expected)


def test_a_policy_that_is_its_own_reference_has_no_margin(make_job: Any, machines: Any, tmp_path: Path) -> None:
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), following(make_job(DPO), 1.0, 1), tmp_path / "progress")
        for _ in range(3):
            (report,) = train(ranks, 1)
            assert report.sums["loss"] / report.normaliser == pytest.approx(math.log(2), abs=1e-5)
        ranks = open_job(group, machines(1), following(make_job(DPO), 1.0, 100), tmp_path / "other")
        reports = [train(ranks, 1)[0] for _ in range(3)]
        off = abs(reports[2].sums["loss"] / reports[2].normaliser - math.log(2))
        assert off > 1e-2, "of a reference that stays it goes away"


@pytest.mark.parametrize(
    ("world", "zero_stage"), cases([(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)], usual=[(2, 1), (2, 3)])
)
def test_a_reference_in_bf16_goes_all_of_a_small_part_of_the_way(
    world: int, zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """The right way is the equation's in fp32, from the optimiser's master weights, which checkpoints for the store hold. A
    number in bf16 has 8 digits of precision: 0.005 of the way to a policy that is near is rounded away."""
    job = following(make_job(DPO, bf16=True), 0.005, 1)
    start = {n: weight.bfloat16().float() for n, weight in load_file(job.model.path / "model.safetensors").items()}
    expected = dict(start)
    with machines(world).trainers() as group:
        ranks = open_job(group, machines(world), job, tmp_path / "progress", zero_stage=zero_stage, progress="store")
        for step in range(1, 7):
            train(ranks, 1)
            save_progress([ranks], tmp_path / "progress")
            stored = portable(tmp_path / "progress" / f"step-{step:08d}")
            policy = {
                n.removeprefix("weights.model."): weight for n, weight in stored.items() if n.startswith("weights.")
            }
            expected = {name: torch.lerp(weight, policy[name], 0.005) for name, weight in expected.items()}
    saved = load_file(tmp_path / "progress" / "step-00000006" / REFERENCE)
    assert {weight.dtype for weight in saved.values()} == {torch.float32}, (
        "a resumed run continues from the mixed reference"
    )
    way, right = (
        torch.cat([(weights[n] - start[n]).flatten() for n in sorted(saved)]) for weights in (saved, expected)
    )
    assert float((way - right).norm() / right.norm()) < 1e-3


@pytest.mark.parametrize("method", [DPO, CHANGING], ids=["dpo", "β of each batch"])
def test_ranks_and_sharding_do_not_change_the_result(method: Any, make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = following(make_job(method), 0.5, 1)
    single = trained(machines(1), job, tmp_path / "one")
    for stage in (0, 2, 3):
        both = trained(machines(2), job, tmp_path / f"{stage}", zero_stage=stage, max_tokens_per_microbatch=64)
        assert greatest_difference(single, both) < 1e-5
    still = trained(machines(1), following(make_job(method), 0.5, 100), tmp_path / "still")
    assert greatest_difference(single, still) > 1e-5, "or nothing would be tested"


def test_a_reference_of_another_architecture_is_refused(
    make_job: Any, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    other = Model(tiny_model("qwen2"), MODEL)
    job = replace(following(make_job(DPO), 0.5, 1), reference=other)
    with (
        machines(1).trainers() as group,
        pytest.raises(
            UserError, match=r"has another architecture \(.*: \d+, the policy's none\): give a model of the policy's"
        ),
    ):
        open_job(group, machines(1), job, tmp_path / "progress")


@pytest.mark.parametrize(
    ("zero_stage", "bf16"), cases([(0, False), (2, True), (3, False)], usual=[(2, True), (3, False)])
)
def test_a_resumed_job_ends_in_the_same_bytes(
    zero_stage: int, bf16: bool, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job, progress = following(make_job(DPO, bf16=bf16), 0.5, 2), tmp_path / "progress"
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, progress, zero_stage=zero_stage)
        train(ranks, 3)
        save_progress([ranks], progress)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks, state = opened(group, machines(2), job, progress, zero_stage=zero_stage)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole


def log_probabilities(model: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Of each answer after its prompt in nats, by plain `transformers`, one sequence at a time."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    results = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logps = loaded(ids).logits[0].log_softmax(-1)
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
        results.append(logps[places, ids[0, places + 1]].sum())
    return torch.stack(results)


@pytest.mark.parametrize("method", [DPO, CHANGING], ids=["dpo", "β of each batch"])
def test_held_out_metrics_compare_with_the_reference_as_training_begins(
    method: Any, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """One step gives the same policy for any later change of the reference, so its held-out loss must be the same, too:
    the mean of -log σ(β((w - w₀) - (l - l₀))) with the log-probabilities of the policy and of the start by `transformers`."""
    job, losses = make_job(method), []
    table = pq.read_table(job.test_data).to_pydict()
    with machines(2).trainers() as group:
        for mixup, every in ((1.0, 1), (0.25, 1), (0.25, 100)):
            folder = tmp_path / f"{mixup}-{every}"
            ranks = open_job(group, machines(2), following(job, mixup, every), folder)
            train(ranks, 1)
            save_progress([ranks], folder)
            losses.append(held_out_loss(ranks))
            losses.append(held_out_loss(open_job(group, machines(2), following(job, mixup, every), folder)))
        trained_model = export(ranks, tmp_path / "policy").parent
    sides = [
        log_probabilities(model, table["prompt_ids"], table[side])
        for model in (trained_model, job.model.path)
        for side in ("chosen_ids", "rejected_ids")
    ]
    margins = (sides[0] - sides[2]) - (sides[1] - sides[3])
    expected = float(-torch.nn.functional.logsigmoid(0.3 * margins).mean())
    assert abs(expected - math.log(2)) > 1e-2, "or a reference that moves to the policy would not be noticed"
    assert losses == pytest.approx([expected] * 6, abs=1e-4)


def held_out_loss(ranks: Any) -> float:
    reports = ranks.all(Trainer.evaluate)
    return sum(report.sums["loss"] for report in reports) / sum(report.normaliser for report in reports)
