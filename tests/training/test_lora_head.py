"""The head of a language model beside LoRA adapters on real ranks: trained whole, or with an adapter of its own.

Each rank has the logits of more than 256 places, so that the head is called for several parts of them: ZeRO 3 gathers its
weights for each call, in the forward pass and where the backward pass computes the parts again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import load_file

from alignment_core.models.model_ref import Model
from alignment_core.models.vocabulary_head import PLACES
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.sft import Sft
from alignment_core.training.resumable import save_progress
from alignment_core.training.trainer import TrainJob
from tests.training.adapted_head import HeadAdapted
from tests.training.conftest import MODEL
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train, trained

pytestmark = pytest.mark.slow

HEAD = "lm_head.weight"
WHOLE = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
ADAPTED = {"r": 4, "target_modules": ["q_proj", "lm_head"]}
CPO = Dpo(DpoLossConfig(loss_type="cpo", nll_weight=1.0))


@pytest.fixture
def job(request: Any, make_job: Any, tiny_model: Any) -> TrainJob:
    """Of the method and adapters of the test: 14 rows of more than 128 targets, of which each of two ranks gets three."""
    method, lora = request.param
    random = np.random.default_rng(3)
    ids = {name: random.integers(0, 256, (14, 180)).tolist() for name in ("input_ids", "chosen_ids", "rejected_ids")}
    prompts = random.integers(0, 256, (14, 40)).tolist()
    masks = [[0] * 40 + [1] * 140] * 14
    table = pa.table({**ids, "loss_mask": masks, "prompt_ids": prompts, "margin": [0.0] * 14})
    job = make_job(method, table, lora=lora)
    kind = HeadAdapted if lora == ADAPTED else TrainJob
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    return kind(**{**fields, "model": Model(tiny_model(tied=False), MODEL)})


@pytest.mark.parametrize("job", [(Sft(), WHOLE), (CPO, WHOLE), (Sft(), ADAPTED), (CPO, ADAPTED)], indirect=True)
def test_zero_3_trains_the_head_as_one_rank_does_and_resumes_to_the_same_bytes(
    job: TrainJob, machines: Any, tmp_path: Path
) -> None:
    assert PLACES < 3 * 140
    budget = {"max_tokens_per_microbatch": 4096}
    single = trained(machines(1), job, tmp_path / "one", zero_stage=0, **budget)
    before = load_file(job.model.path / "model.safetensors")
    assert float((single[HEAD] - before[HEAD]).abs().max()) > 1e-4, "it did train"
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, tmp_path / "progress", zero_stage=3, **budget)
        train(ranks, 2)
        save_progress([ranks], tmp_path / "progress")
        train(ranks, 1)
        whole = export(ranks, tmp_path / "whole")
        ranks, state = opened(group, machines(2), job, tmp_path / "progress", zero_stage=3, **budget)
        assert state["step"] == 2
        train(ranks, 1)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole.read_bytes()
    assert greatest_difference(single, load_file(whole)) < 1e-5
