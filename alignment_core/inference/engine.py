"""One vLLM engine as an actor holds it: it stays warm, takes new weights while it runs, and samples."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.cluster.device import Device
from alignment_core.columns import parts
from alignment_core.errors import UserError
from alignment_core.imports import hidden, uncollected
from alignment_core.inference.options import BY_DEVICE, adapter_options, started
from alignment_core.memory import memory_explained
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import check_loadable, checkpoint_dtype
from alignment_core.models.weight_transfer import Bucket
from alignment_core.recipes import GenerationConfig, ResourcesConfig

MOST_SEQUENCES = 256
"""Completions that an engine samples at a time; others wait."""
WEIGHTS, CACHE = "weights", "kv_cache"
"""What vLLM calls the two parts of its memory that sleep."""
WORKER_EXTENSION = "alignment_core.inference.weights.WeightUpdate"


def prepare() -> None:
    """Import vLLM, which takes seconds and needs no model."""
    # vLLM makes its operators known to torch's compiler, whose import takes a second, also where nothing compiles.
    compiler = ["torch._inductor.lowering"] if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else []
    with uncollected(), hidden(*compiler):
        import vllm

        vllm.LLM  # noqa: B018 (imported on first use)


@dataclass(frozen=True)
class Completion:
    """One sampled completion. Token ids [T] and their log-probabilities [T] under the sampling distribution."""

    token_ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    """[T] Version of the weights that each token was sampled with."""
    finish_reason: str

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logps) == len(self.versions):
            raise RuntimeError(f"{len(self.token_ids)} sampled tokens have {len(self.logps)} log-probabilities")


@dataclass(frozen=True)
class Completions:
    """Several completions as columns, one after the other: what travels between processes."""

    token_ids: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    ends: np.ndarray
    """[C] Where each of them ends in the columns."""
    finish_reasons: list[str]

    @classmethod
    def of(cls, each: Sequence[Completion]) -> Completions:
        """The columns of these."""
        return cls(
            np.concatenate([one.token_ids for one in each]),
            np.concatenate([one.logps for one in each]),
            np.concatenate([one.versions for one in each]),
            np.cumsum([len(one.token_ids) for one in each]),
            [one.finish_reason for one in each],
        )

    def each(self) -> list[Completion]:
        """One by one, as views."""
        columns = [parts(column, self.ends) for column in (self.token_ids, self.logps, self.versions)]
        return [Completion(*one) for one in zip(*columns, self.finish_reasons, strict=True)]


@dataclass(frozen=True)
class Request:
    """One completion to sample beside others that are under way."""

    name: str
    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int


@dataclass
class _UnderWay:
    """A request, and what was sampled of it so far."""

    request: Request
    sampling: Any
    """Of vLLM: with the tokens that are left."""
    adapted: bool = False
    """Whether vLLM samples it with an adapter."""
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Engine:
    """Holds ``vllm.LLM`` for one architecture; ``policy`` says whose weights are in it."""

    def __init__(
        self,
        policy: Model,
        max_model_len: int,
        resources: ResourcesConfig,
        device: Device,
    ) -> None:
        if resources.tensor_parallel_size > 1 and device.kind == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the GPUs are those of the workers that vLLM starts over Ray
        folder = check_loadable(policy.path)
        prepare()
        import vllm

        make = functools.partial(
            vllm.LLM,
            str(folder),
            dtype=checkpoint_dtype(policy.path),
            max_model_len=max_model_len,
            max_num_seqs=MOST_SEQUENCES,
            skip_tokenizer_init=True,
            trust_remote_code=policy.trust_remote_code,
            logprobs_mode="processed_logprobs",  # the distribution that was sampled from, at any temperature
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            **BY_DEVICE.get(device.kind, {}),
            **device.engine_options(resources),
            **adapter_options(resources.max_lora_rank),
        )
        self.llm = started(make, folder, max_model_len, resources)
        if resources.max_lora_rank and device.kind == "cpu" and any(self.llm.collective_rpc("adapts_experts")):
            raise UserError(
                "resources.max_lora_rank: on a CPU vLLM cannot add adapters to a mixture of experts; leave it out, so "
                "that engines get merged weights"
            )
        self._max_model_len = max_model_len
        self.policy = str(policy.reference)
        self.version = 0
        """Of the weights, as whoever sends them counts; each token says which it was sampled with."""
        self.under_way: dict[str, _UnderWay] = {}
        self._updates, self._checked = 0, False
        """New weights that it has taken in, and whether :meth:`parity` was asked for after some."""
        self._half = False
        """Whether some of new weights are in it, and not all."""
        self._adapter: Any = None
        """Of vLLM: the adapter that what is sampled is sampled with."""
        self._keeps_base = resources.max_lora_rank is not None
        self._asleep: set[str] = set()
        """What of its memory it gave away."""
        self._tokens = resources.max_tokens_per_microbatch
        self._own_gpu = device.kind == "cuda" and resources.tensor_parallel_size == 1

    def is_lost(self) -> bool:
        """Whether one of its workers died; the others, which may wait for that one, are ended then."""
        executor = self.llm.llm_engine.model_executor
        lost = getattr(executor, "is_failed", False)
        for worker in getattr(executor, "workers", ()) if lost else ():
            worker.proc.kill()
        return lost

    def sleep(self) -> None:
        """Give the GPU's memory away until new weights come: those that it holds are dropped, and what attention remembers.

        Where only adapters may come, the weights go to the CPU's memory instead. On a CPU it only stops sampling.
        """
        if not self._asleep:
            self.policy = ""
            self.llm.sleep(level=1 if self._keeps_base else 2)
            self._asleep = {WEIGHTS, CACHE}

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            with memory_explained(self._tokens):  # trainers that work on less leave more of it
                self.llm.wake_up([part])
            self._asleep.remove(part)

    def load(self, model: Path, policy: str) -> float:
        """Put the weights of the folder ``model`` into the running engine; seconds it took (0 if they are in it)."""
        if policy == self.policy:
            return 0.0
        started = time.monotonic()
        self.policy, self._half = "", True  # whatever happens now, the engine must not pass for the old policy
        self._wake(WEIGHTS)
        self._adapter = None
        self.llm.collective_rpc("load_checkpoint", args=(str(model),))
        self._holds(policy, 0)
        return time.monotonic() - started

    def begin_update(self) -> None:
        """Make ready for new weights, which come in buckets; what is being sampled waits, and one that sleeps wakes up."""
        self.policy, self._half = "", True
        self._wake(WEIGHTS)
        self._adapter = None
        self.llm.collective_rpc("begin_update")

    def take_bucket(self, bucket: Bucket) -> None:
        """Take in some of the new weights."""
        self.llm.collective_rpc("take_bucket", args=(bucket,))

    def take_adapter(self, files: Mapping[str, bytes]) -> None:
        """Put an adapter, by the names and contents of ``peft``'s files, beside the weights that are there, in place of the one
        before; what is being sampled waits."""
        from vllm.lora.request import LoRARequest

        self.policy, self._half = "", True
        self._wake(WEIGHTS)
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self.llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            self._adapter = LoRARequest("policy", 1, folder)

    def use_adapter(self, policy: str, version: int) -> None:
        """The new adapter is there: what is being sampled goes on with it."""
        self._holds(policy, version)

    def end_update(self, policy: str, version: int) -> None:
        """All new weights are there: what is being sampled goes on with them."""
        self.llm.collective_rpc("end_update")
        self._holds(policy, version)

    def _holds(self, policy: str, version: int) -> None:
        """What attention remembers of the old weights goes, also that of completions under way: they are read again."""
        self._wake(CACHE)
        self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        self.policy, self.version, self._half = policy, version, False
        self._updates += 1
        # vLLM keeps the adapter that a request came with, or none: those that began with the other continue as new requests.
        for name, known in self.under_way.items():
            if known.adapted != (self._adapter is not None):
                self.llm.llm_engine.abort_request([name], internal=False)
                known.sampling = known.sampling.clone()
                known.sampling.max_tokens = known.request.max_tokens - len(known.token_ids)
                if known.sampling.seed is not None:
                    known.sampling.seed = (known.request.seed + len(known.token_ids)) % 2**31
                self._submit(known)

    def _submit(self, known: _UnderWay) -> None:
        """Let vLLM sample what is left of a request."""
        prompt = {"prompt_token_ids": [*known.request.prompt_ids, *known.token_ids]}
        known.adapted = self._adapter is not None
        self.llm.llm_engine.add_request(known.request.name, prompt, known.sampling, lora_request=self._adapter)

    def generate(
        self,
        policy: str,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        stop_ids: Sequence[int],
        seed: int,
        first: int = 0,
    ) -> Completions:
        """Sample ``config.num_generations`` completions per prompt, which stand together; each of ``stop_ids`` ends
        one.

        The same arguments give the same tokens, whatever this engine did before: each prompt has its own seed, by its
        number from ``first`` on, and the prefix cache is emptied first.
        """

        self._begin_batch(policy)
        sampling = [
            self._sampling(config, stop_ids, (seed + 104_729 * (first + number)) % 2**31, n=config.num_generations)
            for number in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False, lora_request=self._adapter)
        return Completions.of([self._completion(one) for output in outputs for one in output.outputs])

    def sample(
        self, policy: str, requests: Sequence[Request], config: GenerationConfig, stop_ids: Sequence[int]
    ) -> Completions:
        """One completion for each request. The same arguments give the same tokens, whatever this engine did before."""
        self._begin_batch(policy)
        sampling = [self._sampling(config, stop_ids, one.seed, max_tokens=one.max_tokens) for one in requests]
        prompts = [{"prompt_token_ids": list(one.prompt_ids)} for one in requests]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=self._adapter)
        return Completions.of([self._completion(output.outputs[0]) for output in outputs])

    def _begin_batch(self, policy: str) -> None:
        """Forget all that could make the next completions differ from those of another engine with these weights."""
        if policy != self.policy:
            raise RuntimeError(f"engine holds {self.policy or 'half-loaded weights'}, but the request is for {policy}")
        self.drop_all()
        self.llm.reset_prefix_cache()

    def advance(
        self, fresh: Sequence[Request], config: GenerationConfig, stop_ids: Sequence[int], seconds: float
    ) -> list[tuple[str, Completion]]:
        """Sample for about ``seconds`` at what is under way and at ``fresh`` requests; the completions that are done.

        Others stay under way, also over an update of the weights.
        """
        import vllm

        for request in fresh:
            sampling = self._sampling(config, stop_ids, request.seed, max_tokens=request.max_tokens)
            sampling.output_kind = vllm.sampling_params.RequestOutputKind.DELTA
            self.under_way[request.name] = _UnderWay(request, sampling)
            self._submit(self.under_way[request.name])
        done: list[tuple[str, Completion]] = []
        deadline = time.monotonic() + seconds
        while self.under_way and time.monotonic() < deadline:
            for output in self.llm.llm_engine.step():
                (news,), known = output.outputs, self.under_way[output.request_id]
                known.token_ids += news.token_ids
                known.logps += news.logprobs.logprobs
                known.versions += [self.version] * len(news.token_ids)
                if output.finished:
                    done.append((output.request_id, self._finished(output.request_id, str(news.finish_reason))))
        return done

    def _finished(self, name: str, reason: str) -> Completion:
        known = self.under_way.pop(name)
        logps, versions = np.asarray(known.logps, np.float32), np.asarray(known.versions, np.int32)
        return Completion(np.asarray(known.token_ids, np.int32), logps, versions, reason)

    def drop_all(self) -> None:
        """Forget what is under way."""
        self.llm.llm_engine.abort_request(list(self.under_way), internal=False)
        self.under_way.clear()

    def let_go(self, sleep: bool) -> None:
        """Forget what a stage left under way, and ``sleep`` if others need the memory until the next one. Raises RuntimeError
        where not all of new weights came."""
        if self._half:
            raise RuntimeError("the engine holds half-loaded weights")
        self.drop_all()
        if sleep:
            self.sleep()

    @staticmethod
    def _sampling(config: GenerationConfig, stop_ids: Sequence[int], seed: int, **more: Any) -> Any:
        import vllm

        return vllm.SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=None if config.temperature == 0 else seed,
            logprobs=0,  # those of the sampled tokens alone
            flat_logprobs=True,
            stop_token_ids=list(stop_ids),
            detokenize=False,
            **{"max_tokens": config.max_completion_length, **more},
        )

    def _completion(self, output: Any) -> Completion:
        sampled = (output.token_ids, np.int32), (output.logprobs.logprobs, np.float32)
        ids, logps = (np.fromiter(one, kind, len(one)) for one, kind in sampled)
        return Completion(ids, logps, np.full(len(ids), self.version, np.int32), str(output.finish_reason))

    def first_parity(self, model: Model, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> float | None:
        """:meth:`parity`, None if there were no new weights yet or it was looked at after some."""
        if self._checked or not self._updates:
            return None
        return self.parity(model, prompts, stop_ids)

    def parity(self, model: Model, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> float:
        """Largest difference, in nats, between this engine's log-probabilities and those of ``transformers``.

        Samples a few short completions and runs ``model`` over the same tokens, which takes a second copy of it: on the
        engine's GPU where there is room, or else in the CPU's memory.
        """
        import torch

        from alignment_core.losses.logprobs import token_logps
        from alignment_core.models.rope import RopeLengths

        config = GenerationConfig(num_generations=1, max_completion_length=16)
        sampled = self.generate(self.policy, prompts, config, stop_ids, seed=0).each()
        reference = model.load("lm", torch.bfloat16 if model.bf16 else torch.float32).eval()
        RopeLengths(reference, self._max_model_len)
        size = sum(parameter.nbytes for parameter in reference.parameters())
        if self._own_gpu and 2 * size < torch.cuda.mem_get_info()[0]:
            reference = reference.to("cuda")
        worst = 0.0
        for prompt, completion in zip(prompts, sampled, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]], device=reference.device)
            with torch.no_grad():
                logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = token_logps(logits, ids[0, len(prompt) :]).cpu().numpy()
            worst = max(worst, float(np.abs(expected - completion.logps).max()))
        self._checked = self._updates > 0
        return worst
