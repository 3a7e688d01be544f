"""Training mode on real DeepSpeed ranks: the dropout of a model's own configuration is off, unless fine-tuning enables
it; that of adapters, the loss of routers and gradient checkpointing are on in every step."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment_core.models.model_ref import Model
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.sft import Sft
from alignment_core.training.trainer import Trainer
from tests.matrix import cases
from tests.stages.calls import ROOT
from tests.training.conftest import MODEL
from tests.training.test_trainer_ranks import export, open_job, train

pytestmark = pytest.mark.slow


@pytest.fixture
def noisy_model(tiny_model: Any, tmp_path: Path) -> Model:
    """A model whose configuration has dropout in its attention."""
    folder = tmp_path / "noisy"
    shutil.copytree(tiny_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.3}))
    return Model(folder, MODEL)


@pytest.mark.parametrize("resources", [{"zero_stage": 0}, {"zero_stage": 3, "gradient_checkpointing": True}])
def test_dpo_of_a_policy_that_is_its_own_reference_has_a_loss_of_ln_2(
    resources: dict[str, Any], noisy_model: Model, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """Equal policies have log-ratios of 0, and −ln σ(0) = ln 2."""
    sync = ReferenceSyncConfig(mixup_alpha=1.0, sync_steps=1)
    job = replace(make_job(Dpo(DpoLossConfig(beta=0.3))), model=noisy_model, sync=sync, reference_logps=None)
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, tmp_path / "progress", **resources)
        for _ in range(2):
            (report,) = train(ranks, 1)
            ranks.all(Trainer.evaluate)  # and back into training mode
            assert report.sums["loss"] / report.normaliser == pytest.approx(math.log(2), abs=1e-5)
        stored = json.loads((export(ranks, tmp_path / "model").parent / "config.json").read_text())
    assert stored["attention_dropout"] == 0.3, "the exported configuration is unchanged"


def test_supervised_fine_tuning_turns_dropout_on_by_an_option(
    noisy_model: Model, make_job: Any, tiny_model: Any, machines: Any, tmp_path: Path
) -> None:
    plain, job = make_job(Sft()), replace(make_job(Sft()), model=noisy_model)
    losses = []
    with machines(1).trainers() as group:
        for number, variant in enumerate((plain, job, replace(job, dropout=True))):
            ranks = open_job(group, machines(1), variant, tmp_path / str(number), zero_stage=0)
            losses.append(train(ranks, 1)[0].sums["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert abs(losses[2] - losses[0]) > 1e-4 * losses[0], "from the first step on"


def losses_of(ranks: Any) -> list[dict[str, float]]:
    """Sums of the first two steps, each after a pass over held-out rows, which is in evaluation mode."""
    losses = []
    for _ in range(2):
        ranks.all(Trainer.evaluate)
        (report,) = train(ranks, 1)
        losses.append(dict(report.sums))
    return losses


def test_the_dropout_of_adapters_is_on_in_every_step(make_job: Any, machines: Any, tmp_path: Path) -> None:
    """Adapters begin at zero, so their dropout has no effect in the first step, and has one from then on."""
    losses = []
    with machines(1).trainers() as group:
        for rate in (0.0, 0.5):
            lora = {"r": 4, "lora_alpha": 64, "lora_dropout": rate}
            job = make_job(Sft(), lora=lora, learning_rate=1e-2)
            losses.append(losses_of(open_job(group, machines(1), job, tmp_path / str(rate), zero_stage=0)))
    (first, second), (first_dropped, second_dropped) = losses
    assert first["loss"] == pytest.approx(first_dropped["loss"], rel=1e-6)
    assert abs(second["loss"] - second_dropped["loss"]) > 1e-3 * second["loss"]


def test_the_loss_of_routers_is_added_in_every_step(
    make_job: Any, machines: Any, mixture_model: Any, tmp_path: Path
) -> None:
    job = replace(make_job(Sft(), router_aux_loss_coef=0.5), model=Model(mixture_model("mixtral"), MODEL))
    with machines(1).trainers() as group:
        first, second = losses_of(open_job(group, machines(1), job, tmp_path / "progress", zero_stage=0))
    assert second["aux_loss"] == pytest.approx(first["aux_loss"], rel=0.1)


COUNTING = """
import json, pickle, sys
from alignment_core.cluster.device import Device
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.ranks import join

folder, checkpointing = sys.argv[1:]
resources = ResourcesConfig(device="cpu", trainers=1, threads=1, gradient_checkpointing=checkpointing == "True")
device = Device.detect("cpu")
join(0, 1, f"file://{folder}/meet", resources, device)
with open(f"{folder}/job", "rb") as file:
    trainer = pickle.load(file).open(resources, device, 0, 1)
calls, passes = [], []
trainer.learner.packed.model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
for _ in range(2):
    calls.clear()
    trainer.train(1, 3600.0)
    passes.append(len(calls))
    trainer.evaluate()
print(json.dumps(passes))
"""
"""How often the first layer is computed in each of two steps of one micro-batch, with an evaluation between them."""


@pytest.mark.parametrize(("checkpointing", "passes"), cases([(False, 1), (True, 2)], usual=[(True, 2)]))
def test_gradient_checkpointing_computes_a_layer_again_in_the_backward_pass_of_every_step(
    checkpointing: bool, passes: int, make_job: Any, tmp_path: Path
) -> None:
    (tmp_path / "job").write_bytes(pickle.dumps(make_job(Sft())))
    command = [sys.executable, "-c", COUNTING, str(tmp_path), str(checkpointing)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1]) == [passes, passes]
