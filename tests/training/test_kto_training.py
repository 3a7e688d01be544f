"""KTO's loss, whose baseline is that of the whole batch: neither micro-batches nor ranks nor packing change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from alignment_core.models.loading import load_model
from alignment_core.models.microbatch import Row, cut, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.methods.base import BatchMethod
from alignment_core.training.methods.kto import Kto
from alignment_core.training.methods.sft import Sft
from alignment_core.training.resumable import save_progress
from alignment_core.training.step_report import StepReport
from alignment_core.training.trainer import Trainer
from tests.training.conftest import random_ids
from tests.training.test_batch_invariance import assert_equal, loss_and_gradient, padded_logps
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, train

ROWS, BETA, WEIGHTS = 14, 0.3, (1.0, 1.5)
KTO = Kto(KtoLossConfig(beta=BETA, desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1]))
APO = Kto(KtoLossConfig(loss_type="apo_zero_unpaired", beta=BETA))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """14 labelled completions of nine prompts, of which one has four rows."""
    random = np.random.default_rng(5)
    prompts = [random_ids(random, 4, 24) for _ in range(9)]
    by_row = [prompts[number if number < 9 else number % 3] for number in range(ROWS)]
    answers = [random_ids(random, 2, 30) for _ in range(ROWS)]
    return pa.table({"prompt_ids": by_row, "completion_ids": answers, "label": [n % 3 > 0 for n in range(ROWS)]})


def logps_of(rows: Sequence[Row], per_token: float) -> np.ndarray:
    return np.array([per_token * row.sequences[0].targets.sum() + row.number / 50 for row in rows], np.float32)


@pytest.fixture(scope="module")
def reference(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows, and of the mismatched ones. (The model's are about 5.6 nats a token: so the baseline is above 0.)"""
    return logps_of(KTO.rows(table), -5.5), logps_of(KTO.rows_before(table), -5.8)


def test_a_method_of_the_whole_batch_is_distinguished_from_one_of_rows() -> None:
    assert isinstance(KTO, BatchMethod)
    assert not isinstance(Sft(), BatchMethod)
    assert APO.rows_before(pa.table({})) == [], "a baseline of 0 takes no pass, and no other prompts"


def written_out(model: Any, method: Kto, table: pa.Table, reference: Sequence[np.ndarray]) -> torch.Tensor:
    """The mean loss by plain ``transformers``, term by term."""

    def ratios(rows: Sequence[Row], before: np.ndarray) -> list[torch.Tensor]:
        return [
            logps.sum() - float(sum_before) for logps, sum_before in zip(padded_logps(model, rows), before, strict=True)
        ]

    baseline = 0.0
    if method.config.loss_type == "kto":
        with torch.no_grad():
            of_others = ratios(method.rows_before(table), reference[1])
        baseline = max(0.0, float(sum(of_others)) / ROWS)
        assert baseline > 1, "or nothing would be tested"
    losses = []
    for label, ratio in zip(table["label"].to_pylist(), ratios(method.rows(table), reference[0]), strict=True):
        value = torch.sigmoid(BETA * (ratio - baseline) if label else BETA * (baseline - ratio))
        losses.append((method.config.desirable_weight if label else method.config.undesirable_weight) * (1 - value))
    return torch.stack(losses).mean()


def as_trained(
    model: Any, method: Kto, table: pa.Table, reference: Sequence[np.ndarray], tokens: int, share: bool
) -> Any:
    """As the trainer does it, in packs of at most so many tokens."""

    def run() -> float:
        module = PackedModel(model, "lm", share_prefixes=share)
        rows, before = method.rows(table), method.rows_before(table)

        def passes(rows: Sequence[Row], logps: np.ndarray) -> Any:
            for part in cut(rows, 1, tokens, share)[0]:
                micro = pack(part, share_prefixes=share)
                numbers = [row.number for row in part]
                yield run_packed(module, micro), micro, torch.from_numpy(logps[numbers])

        with torch.no_grad():
            sums = [method.sums_before(*arguments) for arguments in passes(before, reference[1])] if before else []
        of_batch, total = method.of_batch(rows, torch.stack(sums).sum(0) if sums else None, None), 0.0
        for batch_arguments in passes(rows, reference[0]):
            loss, metrics = of_batch.loss(*batch_arguments)
            (loss / method.normaliser(rows)).backward()
            total += float(metrics["loss"]) / ROWS
        return total

    return run


@pytest.mark.parametrize("method", [KTO, APO], ids=["kto", "apo"])
@pytest.mark.parametrize(("tokens", "share"), [(10_000, True), (100, True), (100, False), (1, True)])
def test_a_cut_batch_has_the_loss_and_gradient_of_plain_padded_transformers(
    method: Kto, tokens: int, share: bool, table: pa.Table, reference: Any, tiny_model: Any
) -> None:
    model = load_model(str(tiny_model()), "lm", torch.float32)
    padded = loss_and_gradient(model, lambda: written_out(model, method, table, reference))
    assert_equal(loss_and_gradient(model, as_trained(model, method, table, reference, tokens, share)), padded)


def test_metrics_are_means_over_the_rows_of_a_label(table: pa.Table) -> None:
    # log-ratios 2, 4 (desirable), -1 (undesirable), z₀ = 3: only 4 and -1 are on their side of it.
    # β = 0.3: mean rewards 0.9 and -0.3
    rows, ratios = KTO.rows(table)[1:4], torch.tensor([2.0, 4.0, -1.0])
    assert [row.margin for row in rows] == [1.0, 1.0, 0.0]
    micro = pack(rows)
    logps = torch.zeros(len(micro.labels_K))
    _, metrics = KTO.of_batch(rows, torch.tensor([9.0])).loss(logps, micro, -ratios)
    averages = {name: float(value) / 3 for name, value in metrics.items() if name != "loss"}
    assert averages == pytest.approx(
        {
            "accuracy": 2 / 3,
            "baseline": 3.0,
            "desirable": 2 / 3,
            "reward_desirable": 0.9,
            "reward_undesirable": -0.3,
            "margin": 1.2,
        }
    )
    alone = pack(rows[:2])
    _, metrics = KTO.of_batch(rows[:2], None).loss(torch.zeros(len(alone.labels_K)), alone, -ratios[:2])
    assert [name for name in metrics if name.startswith(("reward", "margin"))] == ["reward_desirable"]


def averages(reports: Sequence[StepReport]) -> dict[str, float]:
    normaliser = sum(report.normaliser for report in reports)
    return {name: sum(report.sums[name] for report in reports) / normaliser for name in reports[0].sums}


def test_ranks_sharding_and_micro_batches_change_neither_the_baseline_nor_the_trained_weights(
    table: pa.Table, reference: Any, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    logps = {
        "split": ["train"] * ROWS + ["test"] * ROWS,
        "row": [*range(ROWS)] * 2,
        "completion_logp": np.tile(reference[0], 2),
        "mismatched_logp": np.tile(reference[1], 2),
    }
    pq.write_table(pa.table(logps), tmp_path / "kto.parquet")
    job = make_job(KTO, table=table, logps=tmp_path / "kto.parquet")
    weights, received = [], []
    for world, tokens, stage in ((1, 10_000, 0), (2, 64, 2), (2, 64, 3)):
        with machines(world).trainers() as group:
            progress, cut = tmp_path / f"{stage}.progress", {"zero_stage": stage, "max_tokens_per_microbatch": tokens}
            ranks = open_job(group, machines(world), job, progress, **cut)
            received.append((averages(train(ranks, 3)), averages(ranks.all(Trainer.evaluate))))
            weights.append(load_file(export(ranks, tmp_path / str(stage))))
    assert all(greatest_difference(weights[0], other) < 1e-5 for other in weights[1:])
    before = load_file(job.model.path / "model.safetensors")
    assert greatest_difference(before, weights[0]) > 1e-3, "it did train"
    for first, *others in zip(*received, strict=True):
        assert first["baseline"] > 1, "or nothing would be tested"
        assert all(first == pytest.approx(other, rel=1e-4) for other in others)


def following(job: Any, mixup_alpha: float, sync_steps: int) -> Any:
    sync = ReferenceSyncConfig(mixup_alpha=mixup_alpha, sync_steps=sync_steps)
    return replace(job, sync=sync, reference_logps=None)


def test_a_policy_that_is_its_own_reference_has_no_rewards(
    table: pa.Table, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """Of mismatched completions neither; held-out rows keep the first reference."""
    job = make_job(KTO, table=table, logps=tmp_path / "none")
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), following(job, 1.0, 1), tmp_path / "progress")
        for _ in range(3):
            metrics = averages(train(ranks, 1))
            rewards = [value for name, value in metrics.items() if name == "baseline" or name.startswith("reward_")]
            assert rewards == pytest.approx([0.0] * len(rewards), abs=1e-5)
        assert abs(averages(ranks.all(Trainer.evaluate))["margin"]) > 1e-3
        ranks = open_job(group, machines(1), following(job, 1.0, 100), tmp_path / "other")
        train(ranks, 1)
        assert abs(averages(train(ranks, 1))["margin"]) > 1e-3, "of a reference that stays it goes away"


def test_a_moving_reference_does_not_depend_on_ranks_and_a_resumed_job_ends_in_the_same_bytes(
    table: pa.Table, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = following(make_job(KTO, table=table, logps=tmp_path / "none"), 0.5, 1)
    weights = []
    for world, tokens, stage in ((1, 10_000, 0), (2, 64, 2)):
        progress, cut = tmp_path / f"{stage}.progress", {"zero_stage": stage, "max_tokens_per_microbatch": tokens}
        with machines(world).trainers() as group:
            ranks = open_job(group, machines(world), job, progress, **cut)
            train(ranks, 2)
            save_progress([ranks], progress)
            train(ranks, 2)
            whole = export(ranks, tmp_path / f"{stage}")
            ranks = open_job(group, machines(world), job, progress, **cut)
            train(ranks, 2)
            assert export(ranks, tmp_path / f"{stage}.resumed").read_bytes() == whole.read_bytes()
            weights.append(load_file(whole))
    assert greatest_difference(*weights) < 1e-5
