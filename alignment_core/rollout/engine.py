"""One vLLM engine as an actor holds it: it stays warm, takes new weights while it runs, and samples."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.cluster.device import Device
from alignment_core.imports import uncollected
from alignment_core.models.saving import checkpoint_dtype
from alignment_core.recipes import GenerationConfig, ResourcesConfig

WORKER_EXTENSION = "alignment_core.rollout.weights.WeightUpdate"


def prepare() -> None:
    """Import vLLM, which takes seconds and needs no model."""
    with uncollected():
        import vllm

        vllm.LLM  # noqa: B018 (imported on first use)


@dataclass(frozen=True)
class Completion:
    """One sampled completion. Token ids [T] and their log-probabilities [T] under the sampling distribution."""

    token_ids: np.ndarray
    logps: np.ndarray
    finish_reason: str


class Engine:
    """Holds ``vllm.LLM`` for one architecture; ``policy`` says whose weights are in it."""

    def __init__(
        self,
        model: str,
        policy: str,
        max_model_len: int,
        resources: ResourcesConfig,
        device: Device,
        trust_remote_code: bool = False,
    ) -> None:
        if resources.tensor_parallel_size > 1 and device.kind == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the GPUs are those of the workers that vLLM starts over Ray
        prepare()
        import vllm

        self.llm = vllm.LLM(
            model,
            dtype=checkpoint_dtype(Path(model)),
            max_model_len=max_model_len,
            max_num_seqs=256,
            skip_tokenizer_init=True,
            trust_remote_code=trust_remote_code,
            logprobs_mode="processed_logprobs",  # the distribution that was sampled from, at any temperature
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            **device.engine_options(resources),
        )
        self.policy, self.trust_remote_code = policy, trust_remote_code

    def load(self, model: str, policy: str) -> float:
        """Put the weights of the folder ``model`` into the running engine; seconds it took (0 if they are in it)."""
        if policy == self.policy:
            return 0.0
        started = time.monotonic()
        self.policy = ""  # whatever happens now, the engine must not pass for the old policy
        self.llm.collective_rpc("load_checkpoint", args=(model,))
        self.llm.reset_prefix_cache()
        self.policy = policy
        return time.monotonic() - started

    def generate(
        self, policy: str, prompts: Sequence[Sequence[int]], config: GenerationConfig, stop: int, seed: int
    ) -> list[list[Completion]]:
        """Sample ``config.num_generations`` completions per prompt; ``stop`` is the token id that ends one.

        The same arguments give the same tokens, whatever this engine did before: each prompt has its own seed and the
        prefix cache is emptied first.
        """
        import vllm

        if policy != self.policy:
            raise RuntimeError(f"engine holds {self.policy or 'half-loaded weights'}, asked for {policy}")
        self.llm.reset_prefix_cache()
        sampling = [
            vllm.SamplingParams(
                n=config.num_generations,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                max_tokens=config.max_completion_length,
                seed=None if config.temperature == 0 else (seed + 104_729 * number) % 2**31,
                logprobs=0,
                stop_token_ids=[stop],
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return [[_completion(one) for one in output.outputs] for output in outputs]

    def parity(self, model: str, prompts: Sequence[Sequence[int]], stop: int, bf16: bool) -> float:
        """Largest difference, in nats, between this engine's log-probabilities and those of ``transformers``.

        Samples a few short completions and runs the folder ``model`` over the same tokens.
        """
        import torch

        from alignment_core.losses.logprobs import token_logps
        from alignment_core.models.packed import load_model

        config = GenerationConfig(num_generations=1, max_completion_length=16)
        sampled = self.generate(self.policy, prompts, config, stop, seed=0)
        dtype = torch.bfloat16 if bf16 else torch.float32
        reference = load_model(model, "lm", dtype, trust_remote_code=self.trust_remote_code).eval()
        worst = 0.0
        for prompt, (completion, *_) in zip(prompts, sampled, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
            with torch.no_grad():
                logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = token_logps(logits, ids[0, len(prompt) :]).numpy()
            worst = max(worst, float(np.abs(expected - completion.logps).max()))
        return worst


def _completion(output: Any) -> Completion:
    ids = np.asarray(output.token_ids, np.int32)
    logps = np.asarray([step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)])
    return Completion(ids, logps.astype(np.float32), str(output.finish_reason))
