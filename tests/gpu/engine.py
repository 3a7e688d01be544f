"""A vLLM engine: its log-probabilities are those of `transformers`, before and after new weights, and it sleeps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from alignment_core.cluster.layout import Place
from alignment_core.recipes import GenerationConfig, ResourcesConfig
from tests.gpu.report import CannotRun
from tests.gpu.size import size_on, stored_model, the_device

MOST = 0.05
"""Greatest mean difference of log-probabilities in bf16, in nats."""
PROMPTS = [[72, 101, 108], [1, 2, 3, 4, 5], [200], list(range(40))]
STOP = 257


def run(kind: str) -> dict[str, Any]:
    """Two models of one architecture; new weights by checkpoints. How they come from a trainer is for the part `grpo`."""
    device, size, figures = the_device(kind), size_on(kind), dict[str, Any]()
    resources = ResourcesConfig(device=device.kind, engines=1, kv_cache_mib=64, threads=1)
    os.environ |= device.engine_environment(resources, Place())
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise CannotRun(f"vLLM cannot be imported: {error}") from None
    from alignment_core.inference.engine import Engine, EngineRequest

    with tempfile.TemporaryDirectory() as folder:
        first, second = (stored_model(Path(folder, name), size, seed) for seed, name in enumerate("ab"))
        engine = Engine(EngineRequest(first, 128), resources, device)
        figures["difference, first weights, nats"] = engine.parity(first, PROMPTS, [STOP])
        figures["difference, another model, nats"] = engine.parity(second, PROMPTS, [STOP])
        engine.load(second.path, str(second.reference))
        figures["difference, checkpoint, nats"] = engine.parity(second, PROMPTS, [STOP])
        free = torch.cuda.mem_get_info()[0] if kind == "cuda" else 0
        engine.sleep()
        if kind == "cuda":
            figures["memory that sleep frees, GiB"] = (torch.cuda.mem_get_info()[0] - free) / 2**30
            assert figures["memory that sleep frees, GiB"] > 0, "a sleeping engine frees no memory"
        engine.load(first.path, str(first.reference))
        figures["difference, checkpoint after sleep, nats"] = engine.parity(first, PROMPTS, [STOP])
        config = GenerationConfig(num_generations=2, max_completion_length=16)
        twice = [engine.generate(str(first.reference), PROMPTS, config, [STOP], seed=0).each() for _ in range(2)]
    same = [[completion.token_ids.tolist() for completion in completions] for completions in twice]
    figures["equal seeds give equal tokens"] = same[0] == same[1]
    differences = [value for name, value in figures.items() if name.startswith("difference") and "another" not in name]
    assert max(differences) <= MOST, f"the engine differs from `transformers` by {max(differences):.3g} nats"
    assert figures["difference, another model, nats"] > 2 * max(differences), "the check cannot tell models apart"
    assert same[0] == same[1] or kind == "cuda", "equal seeds give other tokens"
    return figures
