"""The parity check of a generate stage: when an engine is compared with its model, and the outcomes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.cluster.device import cpu_multiplies_bf16
from alignment_core.errors import NumericError
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import save_checkpoint
from alignment_core.recipes import GenerationConfig, ResourcesConfig
from alignment_core.stages.generate import PARITY_PROMPTS, _check_parity

POLICY = Reference("model", "0" * 64)


class Engines:
    """In place of actors, whose weights cannot be made wrong on purpose: records calls, with a given difference."""

    def __init__(self, difference: float | None) -> None:
        self.difference, self.calls = difference, list[bool]()

    def one(self, rank: int, method: Any, model: Model, prompts: Any, stops: Any, images: Any) -> float | None:
        assert (rank, len(prompts), len(images)) == (0, PARITY_PROMPTS, PARITY_PROMPTS)
        self.calls.append(method is Engine.parity)
        return self.difference


def check(engines: Any, model: Path, updated: bool = True, **resources: Any) -> dict[str, float]:
    policy = Model(model, POLICY)
    context: Any = SimpleNamespace(model=lambda role: policy, resources=ResourcesConfig(**resources))
    prompts = [{"prompt_ids": [number]} for number in range(9)]
    return _check_parity(context, engines, [prompts], [257], updated)


@pytest.mark.parametrize(
    ("when", "updated", "checked"),
    [
        ("first", True, [False]),
        ("always", True, [True]),
        ("never", True, []),
        ("first", False, []),
        ("always", False, []),
    ],
)
def test_parity_is_checked_on_an_engine_as_often_as_configured(
    when: str, updated: bool, checked: list[Any], tiny_model: Any
) -> None:
    engines = Engines(1e-6)
    assert check(engines, tiny_model(), updated, parity_check=when) == ({"parity": 1e-6} if checked else {})
    assert engines.calls == checked


def test_an_engine_checked_before_reports_no_parity(tiny_model: Any) -> None:
    assert check(Engines(None), tiny_model()) == {}


@pytest.mark.parametrize("difference", [2.7, float("nan")])
def test_an_engine_that_does_not_hold_the_policy_ends_the_run(difference: float, tiny_model: Any) -> None:
    with pytest.raises(NumericError, match="the engine does not hold the policy"):
        check(Engines(difference), tiny_model())


def test_rounding_in_bf16_is_not_taken_for_another_policy(tiny_model: Any, machines: Any, tmp_path: Path) -> None:
    """As a pretrained model's, these logits are up to 16, which bf16 has in steps of 1/16. So some log-probabilities are off by
    more than the 0.1 nats that the check allows on average, and those of other weights by far more on average. On a processor
    that does not multiply bf16, the engine computes in fp32."""
    for seed in range(2):
        source = tiny_model("qwen2", False, seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        model.lm_head.weight.data *= 60
        save_checkpoint(model, source, tmp_path / str(seed))
    with machines(1).engines(EngineRequest(Model(tmp_path / "0", POLICY), 128)) as engines:
        assert check(engines, tmp_path / "0", parity_check="always")["parity"] > 0
        with pytest.raises(NumericError, match="the engine does not hold the policy"):
            check(engines, tmp_path / "1", parity_check="always")
        sampling = GenerationConfig(num_generations=8, max_completion_length=16)
        completions = engines.one(0, Engine.generate, str(POLICY), [[1], [2], [3]], sampling, [257], 0).each()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "0", dtype=torch.float32)
    largest = 0.0
    for number, completion in enumerate(completions):
        ids = torch.tensor([1 + number // 8, *completion.token_ids.tolist()])
        with torch.no_grad():
            logps = model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        largest = max(largest, float(np.abs(logps.numpy() - completion.logps).max()))
    assert largest > 0.1 if cpu_multiplies_bf16() else largest < 1e-3
