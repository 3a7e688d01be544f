"""Requests that one vLLM engine is sampling: added one by one, continued over updates of the weights, and dropped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alignment_core.inference.completions import Completion, Completions, Request


@dataclass
class InProgress:
    """A request, and the part of its completion that is sampled."""

    request: Request
    parameters: Any
    """vLLM's, for the tokens that are left."""
    has_adapter: bool = False
    """Whether vLLM samples it with an adapter."""
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def completion(self, finish_reason: str) -> Completion:
        """All that was sampled."""
        logps, versions = np.asarray(self.logps, np.float32), np.asarray(self.versions, np.int32)
        return Completion(np.asarray(self.token_ids, np.int32), logps, versions, finish_reason)


class RequestQueue:
    """The requests of ``vllm.LLM``, in batches or one by one."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.adapter: Any = None
        """vLLM's request for the adapter of new requests; None without one."""
        self.version = 0
        """Version of the weights, which is recorded with each sampled token."""
        self.in_progress: dict[str, InProgress] = {}

    def complete(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any]) -> Completions:
        """Complete a batch; the completions of each prompt are consecutive.

        The prefix cache is reset first, so that the completions do not depend on earlier requests.
        """
        self.drop_all()
        self._llm.reset_prefix_cache()
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, list(parameters), use_tqdm=False, lora_request=self.adapter)
        return Completions.of([_completion(one, self.version) for output in outputs for one in output.outputs])

    def add(self, request: Request, parameters: Any) -> None:
        """Begin to sample a request beside the others."""
        import vllm

        parameters.output_kind = vllm.sampling_params.RequestOutputKind.DELTA
        self.in_progress[request.name] = InProgress(request, parameters)
        self._submit(self.in_progress[request.name])

    def run(self, seconds: float) -> list[tuple[str, Completion]]:
        """Sample for about so many seconds; the completions that are finished, by the names of their requests."""
        finished: list[tuple[str, Completion]] = []
        deadline = time.monotonic() + seconds
        while self.in_progress and time.monotonic() < deadline:
            for output in self._llm.llm_engine.step():
                (delta,) = output.outputs
                known = self.in_progress[output.request_id]
                known.token_ids += delta.token_ids
                known.logps += delta.logprobs.logprobs
                known.versions += [self.version] * len(delta.token_ids)
                if output.finished:
                    del self.in_progress[output.request_id]
                    finished.append((output.request_id, known.completion(str(delta.finish_reason))))
        return finished

    def continue_with(self, version: int, adapter: Any) -> None:
        """Continue with other weights: the KV cache is reset, and running requests are prefilled again."""
        self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        self.version = version
        self.adapter = adapter
        # vLLM keeps the adapter with which a request was added, or none: if that changes, the request is added anew.
        for name, known in self.in_progress.items():
            if known.has_adapter != (adapter is not None):
                self._llm.llm_engine.abort_request([name], internal=False)
                known.parameters = known.parameters.clone()
                known.parameters.max_tokens = known.request.max_tokens - len(known.token_ids)
                if known.parameters.seed is not None:
                    known.parameters.seed = (known.request.seed + len(known.token_ids)) % 2**31
                self._submit(known)

    def drop_all(self) -> None:
        """Abort all requests."""
        self._llm.llm_engine.abort_request(list(self.in_progress), internal=False)
        self.in_progress.clear()

    def _submit(self, known: InProgress) -> None:
        prompt = {"prompt_token_ids": [*known.request.prompt_ids, *known.token_ids]}
        known.has_adapter = self.adapter is not None
        self._llm.llm_engine.add_request(known.request.name, prompt, known.parameters, lora_request=self.adapter)


def _completion(output: Any, version: int) -> Completion:
    ids = np.fromiter(output.token_ids, np.int32, len(output.token_ids))
    logps = np.fromiter(output.logprobs.logprobs, np.float32, len(output.logprobs.logprobs))
    return Completion(ids, logps, np.full(len(ids), version, np.int32), str(output.finish_reason))
