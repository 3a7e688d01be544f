"""The stage's engine against plain ``vllm.LLM.generate`` on the same prompts; seconds of a weight update."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path

STOP = 263  # a token of the byte tokenizer that means nothing
REPEATS, PROMPTS, SAMPLES, LENGTH, SHARD = 3, 128, 4, 48, 64


def main() -> None:
    import vllm

    from alignment_core.artifacts import Reference
    from alignment_core.cluster.device import Device
    from alignment_core.inference.engine import Engine, EngineRequest
    from alignment_core.models.model_ref import Model
    from alignment_core.models.scratch import create_model
    from alignment_core.recipes import GenerationConfig, ResourcesConfig, ScratchModel

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    shape = ScratchModel(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4)
    parameters = create_model(shape, None, 0, folder / "a")
    create_model(shape, None, 1, folder / "b")
    policies = {name: Model(folder / name, Reference("model", name * 64)) for name in "ab"}
    engine = Engine(EngineRequest(policies["a"], 256), ResourcesConfig(), Device.detect("cpu"))
    policy = str(policies["a"].reference)
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(16, 96))] for _ in range(PROMPTS)]
    config = GenerationConfig(num_generations=SAMPLES, max_completion_length=LENGTH, shard_size=SHARD)
    plain = vllm.SamplingParams(
        n=SAMPLES, max_tokens=LENGTH, temperature=1.0, logprobs=0, detokenize=False, stop_token_ids=[STOP]
    )

    def ours() -> int:
        shards = [prompts[i : i + SHARD] for i in range(0, PROMPTS, SHARD)]
        outputs = [engine.generate(policy, shard, config, [STOP], number) for number, shard in enumerate(shards)]
        return sum(len(shard.token_ids) for shard in outputs)

    def reference() -> int:
        engine.llm.reset_prefix_cache()
        outputs = engine.llm.generate([{"prompt_token_ids": p} for p in prompts], plain, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    ours(), reference()
    speeds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(REPEATS):
        for name, part in (("ours", ours), ("plain", reference)):
            started = time.perf_counter()
            speeds[name].append(part() / (time.perf_counter() - started))
    updates = [engine.load(policies[name].path, str(policies[name].reference)) for name in "baba"]
    ratios = [mine / theirs for mine, theirs in zip(speeds["ours"], speeds["plain"], strict=True)]
    print(
        json.dumps(
            {
                "parameters": parameters,
                "tokens_per_second": round(statistics.median(speeds["ours"])),
                "stage_over_plain_generate": round(statistics.median(ratios), 3),
                "weight_update_seconds": round(statistics.median(updates), 4),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
