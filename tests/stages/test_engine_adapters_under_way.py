"""Running completions continue with an engine's first adapter, with a version per token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.execution.machines import WarmMachines
from alignment_core.inference.completions import Completion, Request
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes import GenerationConfig, LoraConfig
from tests.models.test_adapters import adapted
from tests.stages.test_engine_adapters import POLICY, PROMPTS, give

pytestmark = pytest.mark.slow

CONFIG = GenerationConfig(num_generations=1, max_completion_length=60)
STOP = 263
"""The last token id; these models almost never sample it."""


@pytest.fixture(scope="module")
def takes_adapters(machines: Any) -> Iterator[WarmMachines]:
    machines(2).actors.connect()
    resources = machines(2).resources.model_copy(update={"max_lora_rank": 8})
    adapter_machines = WarmMachines(resources, machines(2).actors.temporary)
    yield adapter_machines
    adapter_machines.actors.end_actors()


def expected_logps(folder: Path, prompt: list[int], completion: Completion) -> np.ndarray:
    """Log-probability of each token of a completion, by plain `transformers`. [T]"""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    with torch.no_grad():
        logps = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logps[torch.arange(len(logps)), ids[0, len(prompt) :]].numpy()


def test_completions_begun_without_an_adapter_continue_with_the_adapter(
    takes_adapters: WarmMachines, tiny_model: Any, tmp_path: Path
) -> None:
    """Each token's log-probability is that of the weights which its version names: version 0 the model, versions 1 and 2 it
    with an adapter merged in by `peft`."""
    start = tiny_model("llama", True, seed=1)
    requests = [Request(f"r{number}", prompt, 60, seed=number) for number, prompt in enumerate(PROMPTS)]
    done: dict[str, Completion] = {}
    with takes_adapters.engines(EngineRequest(Model(start, POLICY["a"]), 128)) as engines:
        engines.all(Engine.load, start, str(POLICY["a"]))
        done |= engines.one(0, Engine.advance, requests, CONFIG, [STOP], 0.002)
        for version in (1, 2):
            lora = LoraConfig(r=4)
            give(engines, adapted(start, lora, seed=version), lora, tmp_path / str(version), version)
            done |= engines.one(0, Engine.advance, [], CONFIG, [STOP], 0.002)
        while len(done) < len(requests):
            done |= engines.one(0, Engine.advance, [], CONFIG, [STOP], 1.0)
    folders = [start, tmp_path / "1" / "merged", tmp_path / "2" / "merged"]
    for request in requests:
        completion = done[request.name]
        assert (len(completion.token_ids), completion.finish_reason) == (60, "length")
        assert set(completion.versions) == {0, 1, 2}, "or nothing would be tested"
        under = np.stack([expected_logps(folder, list(request.prompt_ids), completion) for folder in folders])
        chosen = under[completion.versions, np.arange(60)]
        np.testing.assert_allclose(completion.logps, chosen, atol=1e-4)
        assert np.abs(under[0] - chosen)[completion.versions > 0].max() > 1e-2, "the adapters do change it"
