"""Engines that are given adapters: they sample as the merged model does, and take whole weights when those come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from alignment_core.artifacts import Reference
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import UserError
from alignment_core.execution.machines import WarmMachines
from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.adapters import merged, save_adapter
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import save_checkpoint
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import LoraConfig
from tests.inference.test_engine_mixtures import MIXTURES
from tests.models.test_adapters import adapted
from tests.stages.killing import Killer
from tests.stages.rl_runs import RESOURCES, Section, rewards_small_letters, rows_of, run_rl, section_of

pytestmark = pytest.mark.slow

POLICY = {name: Reference.parse(f"model@sha256:{name * 64}") for name in "ab"}
PROMPTS = [[72, 101, 108], [1, 2, 3, 4, 5], list(range(40))]


@pytest.fixture(scope="module")
def takes_adapters(machines: Any) -> Iterator[WarmMachines]:
    """Machines like those of the other tests, whose engines take adapters."""
    machines(2).actors.connect()
    resources = machines(2).resources.model_copy(update={"max_lora_rank": 8})
    adapter_machines = WarmMachines(resources, machines(2).actors.temporary)
    yield adapter_machines
    adapter_machines.actors.end_actors()


def difference(engines: ActorGroup[Engine], model: Path) -> float:
    difference = engines.one(0, Engine.parity, Model(model, POLICY["a"]), PROMPTS, [257])
    assert difference is not None
    return difference


def give(engines: ActorGroup[Engine], model: Any, lora: LoraConfig, folder: Path, version: int) -> None:
    """The adapter of a model to the engine, and the model that it amounts to into ``folder``."""
    save_adapter(model, model.state_dict(), lora, None, "model", folder / "adapter")
    save_checkpoint(model, None, folder / "merged", merged(model, model.state_dict()))
    files = {file.name: file.read_bytes() for file in (folder / "adapter").iterdir()}
    engines.one(0, Engine.load_adapter, files)
    engines.all(Engine.use_adapter, f"{POLICY['a']}+{version}", version)


@pytest.mark.parametrize("shape", [("llama", True), ("qwen2", False)], ids=["llama, tied", "qwen2, untied"])
def test_each_adapter_and_then_other_weights_give_their_own_log_probabilities(
    shape: tuple[str, bool], takes_adapters: WarmMachines, tiny_model: Any, tmp_path: Path
) -> None:
    a, b = tiny_model(*shape, seed=1), tiny_model(*shape, seed=2)
    with takes_adapters.engines(EngineRequest(Model(a, POLICY["a"]), 128)) as engines:
        engines.all(Engine.load, a, str(POLICY["a"]))
        assert difference(engines, a) < 1e-4
        for version, lora in enumerate((LoraConfig(r=4), LoraConfig(r=8, use_rslora=True)), start=1):
            give(engines, adapted(a, lora, seed=version), lora, tmp_path / str(version), version)
            assert difference(engines, tmp_path / str(version) / "merged") < 1e-4
            assert difference(engines, a) > 1e-3
        engines.all(Engine.load, b, str(POLICY["b"]))
        assert difference(engines, b) < 1e-4
        engines.all(Engine.begin_update)
        model = adapted(a, LoraConfig(r=4), seed=1)
        for bucket in to_buckets(WeightStream(model, rank=0, zero_stage=0).tensors(merge=False), 50_000):
            engines.one(0, Engine.load_bucket, bucket)
        engines.all(Engine.end_update, str(POLICY["a"]), 0)
        assert difference(engines, a) < 1e-4
        give(engines, model, LoraConfig(r=4), tmp_path / "again", 1)
        assert difference(engines, tmp_path / "again" / "merged") < 1e-4


def test_adapters_of_a_mixture_of_experts_are_refused_on_a_cpu(takes_adapters: WarmMachines, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES["mixtral"])
    model.save_pretrained(tmp_path)
    says = r"^resources\.max_lora_rank: on a CPU vLLM cannot add adapters to a mixture of experts; leave it out"
    request = EngineRequest(Model(tmp_path, POLICY["a"]), 128)
    with pytest.raises(UserError, match=says), takes_adapters.engines(request):
        pass


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return section_of(4, rewards_small_letters(tmp_path), {"max_completion_length": 6}, {"learning_rate": 1e-2})


@pytest.mark.parametrize(
    ("lora", "zero_stage"),
    [
        *(({"r": 4}, 1), ({"r": 4}, 3), ({"r": 4, "load_in_4bit": True}, 2), ({"r": 4, "load_in_8bit": True}, 1)),
        ({"r": 4, "use_dora": True}, 0),
    ],
    ids=["ZeRO 1", "ZeRO 3", "4 bits", "8 bits", "DoRA, which is merged"],
)
def test_training_is_the_same_with_merged_weights_and_with_adapters(
    lora: dict[str, Any],
    zero_stage: int,
    section: Section,
    takes_adapters: WarmMachines,
    machines: Any,
    tiny_model: Any,
    tmp_path: Path,
) -> None:
    section["training"]["lora"], rows = lora, {}
    for way, own in (("merged", machines(2)), ("adapters", takes_adapters)):
        resources = RESOURCES.model_copy(
            update={"zero_stage": zero_stage, "max_lora_rank": own.resources.max_lora_rank}
        )
        outputs, result = run_rl(tmp_path / way, tiny_model(), section, lambda _, own=own: own, resources)
        assert result.metrics["mismatch"] < 1e-6, "the engine samples from the policy that is trained"
        rows[way] = rows_of(outputs)
    assert [row["completion_ids"] for row in rows["adapters"]] == [row["completion_ids"] for row in rows["merged"]]
    for adapter_row, merged_row in zip(rows["adapters"], rows["merged"], strict=True):
        np.testing.assert_allclose(adapter_row["rollout_logps"], merged_row["rollout_logps"], atol=1e-4)


@pytest.mark.parametrize("dies", ["engines", "trainers"])
def test_a_killed_run_resumes_with_its_adapter_beside_the_same_weights(
    dies: str, section: Section, takes_adapters: WarmMachines, tiny_model: Any, tmp_path: Path
) -> None:
    section["training"]["lora"] = {"r": 4, "load_in_4bit": True}
    resources = RESOURCES.model_copy(update={"max_lora_rank": 8, "placement": "disaggregated"})

    def run(name: str, reporter: Any = None) -> Any:
        return run_rl(tmp_path / name, tiny_model(), section, lambda _: takes_adapters, resources, reporter)[1]

    whole = run("whole")
    killed = run("killed", Killer(takes_adapters, dies, at=2))
    assert killed.cost["restarts"] == 1
    assert killed.outputs == whole.outputs
