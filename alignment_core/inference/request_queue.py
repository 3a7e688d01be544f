"""The requests that one vLLM engine samples: added one by one, continued after updates of the weights, and dropped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.inference.completions import Completion, Completions, Request
from alignment_core.inference.decoding import Decoding
from alignment_core.inference.images import prompt_of


@dataclass
class InProgress:
    """A request, and the part of its completion that is sampled."""

    request: Request
    parameters: Any
    """vLLM's sampling parameters for the remaining tokens."""
    has_adapter: bool = False
    """Whether vLLM samples it with an adapter."""
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, finish_reason: str) -> Completion:
        """The tokens sampled so far as a completion."""
        token_ids = np.asarray(self.token_ids, np.int32)
        logps = np.asarray(self.logps, np.float32)
        versions = np.asarray(self.versions, np.int32)
        return Completion(token_ids, logps, versions, finish_reason)


class RequestQueue:
    """The requests of ``vllm.LLM``, in batches or one by one."""

    def __init__(self, llm: Any, reads_images: bool = False) -> None:
        self._llm = llm
        self.reads_images = reads_images
        self.adapter: Any = None
        """vLLM's request for the adapter of new requests; None without one."""
        self.version = 0
        """Version of the weights, which is recorded with each sampled token."""
        self.in_progress: dict[str, InProgress] = {}

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: Sequence[Any],
        images: Sequence[Sequence[Path]] = (),
        decoding: Decoding | None = None,
    ) -> Completions:
        """Complete a batch; the completions of each prompt are consecutive. ``images`` are the paths of each prompt's. With a
        ``decoding`` completions have their texts.

        The prefix cache is reset first, so that the completions do not depend on earlier requests.
        """
        self.drop_all()
        self._llm.reset_prefix_cache()
        requests = [prompt_of(ids, files) for ids, files in zip(prompts, images or [()] * len(prompts), strict=True)]
        outputs = self._llm.generate(requests, list(parameters), use_tqdm=False, lora_request=self.adapter)
        sampled = [completion for output in outputs for completion in output.outputs]
        return Completions.of([_completion(completion, self.version).decoded(decoding) for completion in sampled])

    def add(self, request: Request, parameters: Any) -> None:
        """Start to sample a request beside the others."""
        import vllm

        # Each output has the new tokens alone, which get the version of the weights that sampled them.
        parameters.output_kind = vllm.sampling_params.RequestOutputKind.DELTA
        self.in_progress[request.name] = InProgress(request, parameters)
        self._submit(self.in_progress[request.name])

    def run(self, seconds: float) -> list[tuple[str, Completion]]:
        """Sample for about ``seconds``; returns the completions that are finished, by the names of their requests."""
        finished: list[tuple[str, Completion]] = []
        deadline = time.monotonic() + seconds
        while self.in_progress and time.monotonic() < deadline:
            for output in self._llm.llm_engine.step():
                (delta,) = output.outputs
                progress = self.in_progress[output.request_id]
                progress.token_ids += delta.token_ids
                progress.logps += delta.logprobs.logprobs
                progress.versions += [self.version] * len(delta.token_ids)
                if output.finished:
                    del self.in_progress[output.request_id]
                    finished.append((output.request_id, progress.completion(str(delta.finish_reason))))
        return finished

    def continue_with(self, version: int, adapter: Any) -> None:
        """Continue with other weights: the caches of keys and values and of encoded images are reset, and running requests
        are prefilled again."""
        # Without this option vLLM resets nothing while requests run: they would attend to keys of the old weights.
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        if self.reads_images:
            self._llm.llm_engine.reset_encoder_cache()
        self.version = version
        self.adapter = adapter
        # vLLM samples a request with the adapter that it was added with, or without one: if that changes, it is added again.
        for name, progress in self.in_progress.items():
            if progress.has_adapter != (adapter is not None):
                self._llm.llm_engine.abort_request([name], internal=False)
                progress.parameters = progress.parameters.clone()
                progress.parameters.max_tokens = progress.request.max_tokens - len(progress.token_ids)
                if progress.parameters.seed is not None:  # a restarted generator would repeat its random numbers
                    progress.parameters.seed = (progress.request.seed + len(progress.token_ids)) % 2**31
                self._submit(progress)

    def drop_all(self) -> None:
        """Abort all requests."""
        # By our names: vLLM's internal ones have a random suffix.
        self._llm.llm_engine.abort_request(list(self.in_progress), internal=False)
        self.in_progress.clear()

    def _submit(self, progress: InProgress) -> None:
        prompt = prompt_of([*progress.request.prompt_ids, *progress.token_ids], progress.request.images)
        progress.has_adapter = self.adapter is not None
        self._llm.llm_engine.add_request(progress.request.name, prompt, progress.parameters, lora_request=self.adapter)


def _completion(output: Any, version: int) -> Completion:
    ids = np.fromiter(output.token_ids, np.int32, len(output.token_ids))
    logps = np.fromiter(output.logprobs.logprobs, np.float32, len(output.logprobs.logprobs))
    return Completion(ids, logps, np.full(len(ids), version, np.int32), str(output.finish_reason))
