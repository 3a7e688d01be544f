"""Direct preference optimisation with real stages: its reference is computed once, and for the rows that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from alignment_core.artifacts import Reference, open_store, prune
from alignment_core.artifacts.paths import blob_path
from alignment_core.artifacts.reference import MASTERS
from alignment_core.artifacts.transfer import copy, plan
from alignment_core.composition.graph import composing, submit
from alignment_core.composition.steps import dpo
from alignment_core.errors import Corrupt, DataError, UserError
from alignment_core.execution.base import StageResult
from alignment_core.recipes import DpoLossConfig, TrainingConfig
from alignment_core.recipes.sections.training import LoraConfig
from alignment_core.stages.dpo import DpoStageConfig
from tests.composed import Runs
from tests.stages.killing import store_with

pytestmark = pytest.mark.slow


@pytest.fixture
def composed(machines: Any, tiny_model: Any, tmp_path: Path) -> Iterator[tuple[Runs, Reference, Reference]]:
    """The run, a model, and 14 pairs."""
    texts = [[number + 1] * 3 for number in range(42)]
    pairs = {name: texts[place::3] for place, name in enumerate(("prompt_ids", "chosen_ids", "rejected_ids"))}
    table = pa.table({**pairs, "margin": pa.nulls(14, pa.float32())})
    store, model, data = store_with(tmp_path, tiny_model(), table)
    run = Runs(store, machines(1))
    with composing(run):
        yield run, model, data


def test_another_loss_or_learning_rate_finds_the_passes_of_the_reference_cached(composed: Any) -> None:
    run, model, data = composed
    states = []
    for beta, rate in ((0.1, 1e-3), (0.3, 1e-3), (0.1, 1e-4)):
        training = TrainingConfig(batch_size=6, learning_rate=rate)
        dpo("round-1/dpo", training, DpoLossConfig(beta=beta), model, data, stream="round-1")
        states.append([run.results[label].state for label in ("round-1/reference-logps", "round-1/dpo")])
    assert states == [["run", "run"], ["cached", "run"], ["cached", "run"]]
    assert run.results["round-1/dpo"].metrics["loss.first"] == pytest.approx(0.6931, abs=1e-3), "ln 2: they are equal"


def test_passes_before_a_few_steps_cover_only_the_rows_of_these_steps(composed: Any) -> None:
    run, model, data = composed
    training = TrainingConfig(batch_size=3, max_steps=2)
    dpo("round-1/dpo", training, DpoLossConfig(), model, data, stream="round-1")
    assert run.results["round-1/reference-logps"].metrics == {"rows": 6}
    assert run.results["round-1/dpo"].metrics["steps"] == 2

    few = run.results["round-1/reference-logps"].reference
    inputs = {"model": model, "data": data, "reference_logps": few}
    config = DpoStageConfig(training=training, loss=DpoLossConfig())
    with pytest.raises(DataError, match=r"are missing for \d of the 6 train rows that are used"):
        submit("dpo", "dpo", config, inputs, stream="round-2")  # which takes the rows in another order


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Weights in the files of a folder, by their names in the model."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {name.removeprefix("weights.model."): tensor for name, tensor in load_file(file).items()}
    return tensors


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, lora_alpha=2)], ids=["all weights", "lora"])
def test_a_round_in_bf16_continues_from_the_master_weights_of_the_one_before(lora: Any, composed: Any) -> None:
    run, model, data = composed
    training = TrainingConfig(batch_size=14, learning_rate=1e-5, bf16=True, lora=lora)

    def round_of(number: int, start: Reference, **changes: Any) -> StageResult:
        label = f"round-{number}"
        dpo(f"{label}/dpo", training.model_copy(update=changes), DpoLossConfig(), start, data, stream=label)
        return run.results[f"{label}/dpo"]

    first = round_of(1, model)
    second = round_of(2, first.reference)
    fetch = run.store.fetch
    folders = [(fetch(result.reference), fetch(result.output(MASTERS))) for result in (first, second)]
    for policy, masters in folders:
        exact, rounded = weights_of(masters), weights_of(policy)
        assert all(torch.equal(exact[name].bfloat16(), tensor) for name, tensor in rounded.items())
    before, after = (weights_of(masters) for _, masters in folders)
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert moved.max() < 1.01e-5, "one step: by the learning rate at most"
    assert 0 < second.metrics["changed_weights"] < (moved > 0).float().mean()

    from_bf16 = round_of(2, first.reference, keep_master_weights=False)
    assert list(from_bf16.outputs) == (["model", "adapter"] if lora else ["model"])
    assert from_bf16.key != second.key
    again = round_of(2, first.reference)
    assert (again.state, again.outputs) == ("cached", second.outputs)


def test_damaged_master_weights_are_named_with_what_brings_them_back(composed: Any, tmp_path: Path) -> None:
    run, model, data = composed
    training = TrainingConfig(batch_size=14, learning_rate=1e-5, bf16=True)
    dpo("first", training, DpoLossConfig(), model, data)
    first = run.results["first"]
    masters = first.output(MASTERS)
    other = open_store(tmp_path / "other")
    copy(run.store, other, plan(run.store, other, first.reference, ancestors=False))
    (entry,) = run.store.manifest(masters).files
    blob = Path(run.store.uri, blob_path(entry.sha256))
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.unlink()
    blob.write_bytes(content)
    says = rf"fp32 master weights are not whole.*{masters.short}.*has the digest \w+\): copy them.*--from-stage.*false"
    with pytest.raises(UserError, match=says):
        dpo("second", training, DpoLossConfig(), first.reference, data)
    with pytest.raises(Corrupt, match=masters.short):
        copy(
            run.store, third := open_store(tmp_path / "third"), plan(run.store, third, first.reference, ancestors=False)
        )
    copy(other, run.store, plan(other, run.store, masters, ancestors=False))
    dpo("second", training, DpoLossConfig(), first.reference, data)
    assert run.results["second"].state == "run"


def test_a_policy_whose_master_weights_were_deleted_can_be_trained_from_its_weights_in_bf16(composed: Any) -> None:
    run, model, data = composed
    training = TrainingConfig(batch_size=14, learning_rate=1e-5, bf16=True)
    dpo("first", training, DpoLossConfig(), model, data)
    start = run.results["first"].reference
    prune(run.store, None, None, delete=True, masters_days=1e-9)
    with pytest.raises(
        UserError, match=r"its fp32 master weights are not whole in the store.*keep_master_weights: false"
    ):
        dpo("second", training, DpoLossConfig(), start, data)
    dpo("first", training, DpoLossConfig(), model, data)
    assert run.results["first"].state == "cached", "it is not trained again for them"
    dpo("second", training.model_copy(update={"keep_master_weights": False}), DpoLossConfig(), start, data)
    in_fp32 = TrainingConfig(batch_size=14, learning_rate=1e-5)
    dpo("third", in_fp32, DpoLossConfig(), start, data)
    assert list(run.results["third"].outputs) == ["model"]
    lora = LoraConfig(r=2)
    with_lora = TrainingConfig(batch_size=14, learning_rate=1e-4, bf16=True, lora=lora)
    with pytest.raises(UserError, match=r"master weights are not whole in the store.*keep_master_weights: false"):
        dpo("fourth", with_lora, DpoLossConfig(), start, data)
    dpo("fourth", with_lora.model_copy(update={"keep_master_weights": False}), DpoLossConfig(), start, data)
    assert list(run.results["fourth"].outputs) == ["model", "adapter"]
