"""Engines get the policy of a mixture whose experts have adapters as merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.artifacts import Reference
from alignment_core.inference.channels.buckets import to_buckets
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.adapters import add_adapters, save_adapter
from alignment_core.models.model_ref import Model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import LoraConfig
from tests.inference.test_engine_mixtures import MIXTURES
from tests.stages.killing import Killer
from tests.stages.rl_runs import RESOURCES, Section, rewards_small_letters, rows_of, run_rl, section_of

pytestmark = pytest.mark.slow

POLICY = Reference.parse(f"model@sha256:{'a' * 64}")
PROMPTS = [[72, 101, 108], [1, 2, 3, 4, 5], list(range(40))]
LORA = LoraConfig(r=4, target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


@pytest.fixture
def mixture(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of the mixture that a test names."""
    tokenizer, folder = byte_tokenizer(), tmp_path / "mixture"
    content = MIXTURES[request.param].to_dict() | {"vocab_size": len(tokenizer), "initializer_range": 0.1}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES[request.param].__class__.from_dict(content))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mixture", MIXTURES, indirect=True)
def test_merged_weights_give_an_engine_the_log_probabilities_of_peft(
    mixture: Path, machines: Any, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    add_adapters(model, model.lm_head, LORA, 7, train_head=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(model, model.state_dict(), LORA, None, "model", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    byte_tokenizer().save_pretrained(tmp_path / "merged")

    def difference(engines: Any, folder: Path) -> float:
        difference = engines.one(0, Engine.parity, Model(folder, POLICY), PROMPTS, [257])
        assert difference is not None
        return float(difference)

    with machines(1).engines(EngineRequest(Model(mixture, POLICY), 128)) as engines:
        engines.all(Engine.load, mixture, str(POLICY))
        assert difference(engines, mixture) < 1e-4
        engines.all(Engine.begin_update)
        for bucket in to_buckets(WeightStream(model, rank=0, zero_stage=0).tensors(), 20_000):
            engines.all(Engine.load_bucket, bucket)
        engines.all(Engine.end_update, f"{POLICY}+1", 1)
        assert difference(engines, tmp_path / "merged") < 1e-4
        assert difference(engines, mixture) > 1e-2


@pytest.fixture
def section(tmp_path: Path) -> Section:
    section = section_of(4, rewards_small_letters(tmp_path), {"max_completion_length": 6}, {"learning_rate": 1e-2})
    section["training"]["lora"] = LORA.model_dump(mode="json")
    return section


@pytest.mark.parametrize(("mixture", "zero_stage"), [("qwen3", 1), ("mixtral", 3)], indirect=["mixture"])
def test_the_engine_samples_from_the_experts_that_are_trained(
    mixture: Path, zero_stage: int, section: Section, machines: Any, tmp_path: Path
) -> None:
    resources = RESOURCES.model_copy(update={"zero_stage": zero_stage})
    outputs, result = run_rl(tmp_path / "run", mixture, section, machines, resources)
    assert result.metrics["mismatch"] < 1e-5, "the engine samples from the policy that is trained"
    logps = [row["rollout_logps"] for row in rows_of(outputs)]
    assert all(np.isfinite(of_row).all() for of_row in logps)
    start, trained = (load_file(folder / "model.safetensors") for folder in (mixture, outputs["policy"]))
    assert start.keys() == trained.keys()
    experts = [name for name in start if ".experts." in name]
    assert max(float((trained[name] - start[name]).abs().max()) for name in experts) > 1e-3
    base = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    whole = peft.PeftModel.from_pretrained(base, outputs["adapter"]).merge_and_unload()
    whole.save_pretrained(tmp_path / "whole")
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mixture", ["qwen3"], indirect=True)
@pytest.mark.parametrize("dies", ["engines", "trainers"])
def test_a_killed_run_resumes_with_the_same_experts(
    dies: str, mixture: Path, section: Section, machines: Any, tmp_path: Path
) -> None:
    def run(name: str, reporter: Any = None) -> Any:
        return run_rl(tmp_path / name, mixture, section, machines, RESOURCES, reporter)[1]

    whole = run("whole")
    killed = run("killed", Killer(machines(2), dies, at=2))
    assert killed.cost["restarts"] == 1
    assert killed.outputs == whole.outputs
