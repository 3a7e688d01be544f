"""Fine-tuning with noisy embeddings on real DeepSpeed ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment_core.training.methods.sft import Sft
from alignment_core.training.resumable import save_progress
from alignment_core.training.trainer import Trainer
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train, trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["sft", "sft, alike"])
def test_noise_does_not_depend_on_ranks_or_packs(
    name: str, make_job: Any, tables: Any, machines: Any, tmp_path: Path
) -> None:
    """Also where rows have prefixes that they would share without noise."""
    job = replace(make_job(Sft(), tables[name]), neftune_noise_alpha=5.0)
    single = trained(machines(1), job, tmp_path / "one")
    layout = {"zero_stage": 3, "gradient_checkpointing": True, "max_tokens_per_microbatch": 64}
    assert greatest_difference(single, trained(machines(2), job, tmp_path / "two", **layout)) < 1e-5
    without = trained(machines(1), replace(job, neftune_noise_alpha=0.0), tmp_path / "without")
    assert greatest_difference(single, without) > 1e-4


def test_noise_is_in_training_alone_and_a_resumed_job_ends_in_the_same_bytes(
    make_job: Any, machines: Any, tmp_path: Path
) -> None:
    plain, progress = make_job(Sft()), tmp_path / "progress"
    job = replace(plain, neftune_noise_alpha=5.0)
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), plain, tmp_path / "plain")
        (held_out,) = ranks.all(Trainer.evaluate)
        ranks = open_job(group, machines(1), job, progress)
        assert ranks.all(Trainer.evaluate)[0].sums == pytest.approx(held_out.sums, rel=1e-5)
        train(ranks, 3)
        save_progress([ranks], progress)
        ranks.all(Trainer.evaluate)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks, state = opened(group, machines(1), job, progress)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole
