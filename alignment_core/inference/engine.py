"""One vLLM engine in an actor: it stays warm from stage to stage, loads new weights while it runs, and samples."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment_core.cluster.device import Device
from alignment_core.errors import PeerFailed, UserError
from alignment_core.imports import uncompiled
from alignment_core.inference.channels.buckets import Bucket
from alignment_core.inference.channels.channel import Channel
from alignment_core.inference.channels.control import Address
from alignment_core.inference.completions import Completion, Completions, Request
from alignment_core.inference.decoding import Decoding
from alignment_core.inference.images import OPTIONS, accept_expanded_prompts, never_sampled, without_torchvision
from alignment_core.inference.kv_cache import max_num_seqs_on_cpu, max_num_seqs_on_gpu, mib_of_engine
from alignment_core.inference.options import BY_DEVICE, adapter_options, started, wakes
from alignment_core.inference.parity import mean_difference
from alignment_core.inference.request_queue import RequestQueue
from alignment_core.inference.sampling_parameters import parameters_of
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import check_loadable, is_multimodal
from alignment_core.recipes import GenerationConfig, ResourcesConfig

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's names of the two parts of its memory that can sleep."""
WORKER_EXTENSION = "alignment_core.inference.weights.WeightUpdate"


@dataclass(frozen=True)
class EngineRequest:
    """The model of the engines."""

    policy: Model
    max_model_len: int
    """Maximum number of tokens of prompt and completion."""
    dtype: str | None = None
    """Float type in which the policy is trained while they sample; None: that in which it is stored."""

    def dtype_on(self, device: Device) -> str:
        """Float type in which the engines compute."""
        return device.inference_dtype(self.dtype or self.policy.dtype)


def prepare() -> None:
    """Import vLLM, which takes seconds and needs no model, with what it imports itself once a model is there."""
    with uncompiled():
        import vllm
        from vllm.platforms import current_platform

        vllm.LLM  # noqa: B018 (imported on first use)
        if current_platform.is_cpu():
            import vllm.v1.worker.cpu_worker


def _max_num_seqs(resources: ResourcesConfig, device: Device) -> int:
    if device.kind == "cpu":
        return max_num_seqs_on_cpu(resources)
    from vllm.platforms import current_platform

    try:
        memory, name = current_platform.get_device_total_memory(), current_platform.get_device_name()
    except Exception:  # only the workers of this process have GPUs; vLLM takes them for small ones, too
        memory, name = 0, ""
    return max_num_seqs_on_gpu(resources, memory, name)


class Engine:
    """Holds ``vllm.LLM`` for one architecture; ``policy`` names the weights that it holds."""

    def __init__(self, request: EngineRequest, resources: ResourcesConfig, device: Device) -> None:
        policy = request.policy
        max_model_len = request.max_model_len
        if resources.tensor_parallel_size > 1 and device.kind == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the workers that vLLM starts over Ray have the GPUs
        folder = check_loadable(policy.path)
        self._dtype = request.dtype_on(device)
        shape = json.loads((folder / "config.json").read_text())
        cache_mib = mib_of_engine(shape, max_model_len, self._dtype, resources, device.engines(resources))
        prepare()
        import vllm

        reads_images = is_multimodal(shape)
        if reads_images:
            without_torchvision(shape.get("architectures") or (), resources.tensor_parallel_size)
        make = functools.partial(
            vllm.LLM,
            str(folder),
            dtype=self._dtype,
            max_model_len=max_model_len,
            max_num_seqs=_max_num_seqs(resources, device),
            # Prompts and completions are token ids; but processors of images are made with a tokenizer.
            skip_tokenizer_init=not reads_images,
            trust_remote_code=policy.trust_remote_code,
            logprobs_mode="processed_logprobs",  # those of the sampling distribution, at any temperature
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
            **BY_DEVICE.get(device.kind, {}),
            **device.engine_options(resources, cache_mib),
            **adapter_options(resources.max_lora_rank),
            **(OPTIONS if reads_images else {}),
        )
        self.llm = started(make, folder, self._dtype, max_model_len, resources, device.kind)
        if resources.max_lora_rank and device.kind == "cpu" and any(self.llm.collective_rpc("adapts_experts")):
            raise UserError(
                "resources.max_lora_rank: on a CPU vLLM cannot add adapters to a mixture of experts; leave it out, so "
                "that engines get merged weights"
            )
        if reads_images:
            accept_expanded_prompts(self.llm)
        self.queue = RequestQueue(self.llm, reads_images)
        self._logit_bias = never_sampled(shape) or None
        self.policy = str(policy.reference)
        self._tokenizer = policy.tokenizer
        self._max_model_len = max_model_len
        self._resources = resources
        self._own_gpu = device.kind == "cuda" and resources.tensor_parallel_size == 1
        self._updates = 0
        """Number of weight updates."""
        self._checked = False
        """Whether :meth:`parity` was computed after one of them."""
        self._half_loaded = False
        """Whether a weight update has begun and not ended."""
        self._adapter: Any = None
        """vLLM's request for the adapter of the next update; None without one."""
        self._asleep: set[str] = set()
        """Parts of its memory that are released."""

    def max_num_seqs(self) -> int:
        """Most sequences that it samples at a time. vLLM lets further ones wait while its cache has no room for them."""
        most: int = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        return most

    def is_lost(self) -> bool:
        """Whether one of its workers died. The other workers, which may be waiting for it, are then killed."""
        executor = self.llm.llm_engine.model_executor
        lost = getattr(executor, "is_failed", False)
        for worker in getattr(executor, "workers", ()) if lost else ():
            worker.proc.kill()
        return lost

    def sleep(self) -> None:
        """Release the GPU's memory until new weights come: weights and KV cache are dropped.

        An engine that may get adapters keeps its weights in the CPU's memory. On a CPU it only stops sampling.
        """
        if not self._asleep:
            self.policy = ""
            self.llm.sleep(level=1 if self._resources.max_lora_rank is not None else 2)
            self._asleep = {WEIGHTS, CACHE}

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            with wakes(self._resources):
                self.llm.wake_up([part])
            self._asleep.remove(part)

    def load(self, model: Path, policy: str, adapter_follows: bool = False) -> float:
        """Load the weights of the folder ``model``; seconds it took (0 if the engine holds them). ``adapter_follows``: see
        :meth:`end_update`."""
        if policy == self.policy:
            return 0.0
        started = time.monotonic()
        self._begin()
        self.llm.collective_rpc("load_checkpoint", args=(str(model),))
        self._end(policy, 0, adapter_follows)
        return time.monotonic() - started

    def nodes(self) -> list[str]:
        """Ray's id of the node of each of vLLM's workers, which all receive all weights and keep their part."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        return [node or own for node in self.llm.collective_rpc("node")]

    def free_memory(self) -> list[int]:
        """Bytes of free memory of the GPU of each of vLLM's workers in an update. Call it before one, which must follow: a
        sleeping engine wakes up, without its KV cache."""
        if WEIGHTS in self._asleep:
            self._begin()
        free: list[int] = self.llm.collective_rpc("free_memory")
        return free

    def open_channel(self, channel: Channel, address: Address) -> None:
        """Connect all workers to the trainers' end of a channel, for :meth:`receive_weights`."""
        self.llm.collective_rpc("open_channel", args=(channel, address))

    def close_channel(self) -> None:
        """Close the channel, if one is open."""
        self.llm.collective_rpc("close_channel")

    def receive_weights(self) -> None:
        """Begin an update, and load all weights that the trainers send through the channel meanwhile. Raises PeerFailed if
        these or another engine fail."""
        try:
            self.begin_update()
        except BaseException:
            self.close_channel()  # the trainers wait for no engine that cannot begin
            raise
        self._update("receive_weights")

    def begin_update(self) -> None:
        """Prepare for new weights. A sleeping engine wakes up, without its KV cache; requests in progress wait."""
        self._begin()
        self.llm.collective_rpc("begin_update")

    def begin_delta(self) -> list[str | None]:
        """Expect deltas in the buckets of this update (:mod:`~.channels.deltas`); returns each worker's version."""
        versions: list[str | None] = self.llm.collective_rpc("begin_delta")
        return versions

    def load_bucket(self, bucket: Bucket) -> None:
        """Load some of the new weights, which come as buckets. Raises PeerFailed for deltas of other weights."""
        self._update("load_bucket", bucket)

    def _update(self, method: str, *arguments: Any) -> None:
        """Call a method of all workers that returns the sentence of a failure. Raises PeerFailed with it."""
        failures = self.llm.collective_rpc(method, args=arguments)
        if failure := next(filter(None, failures), None):
            raise PeerFailed(failure)

    def end_update(self, policy: str, version: int, adapter_follows: bool = False) -> None:
        """All new weights are loaded: the KV cache wakes up, and requests in progress continue with them; both at
        :meth:`use_adapter`, if an adapter follows."""
        self.llm.collective_rpc("end_update")
        self._end(policy, version, adapter_follows)

    def load_adapter(self, files: Mapping[str, bytes]) -> None:
        """Load an adapter, in place of the one before, from the names and contents of ``peft``'s files. The weights stay the
        same; requests in progress wait."""
        from vllm.lora.request import LoRARequest

        self._begin()
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self.llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
            # Requests name the adapter without `load_inplace`, with which each of them would load it again.
            self._adapter = LoRARequest("policy", 1, folder)

    def use_adapter(self, policy: str, version: int) -> None:
        """The new adapter is loaded: requests in progress continue with it."""
        self._end(policy, version)

    def _begin(self) -> None:
        # First of all: after a failure from here on, the engine must not count as holding the old or the new policy.
        self.policy = ""
        self._half_loaded = True
        self._wake(WEIGHTS)
        self._adapter = None

    def _end(self, policy: str, version: int, adapter_follows: bool = False) -> None:
        if not adapter_follows:
            self._wake(CACHE)
            self.queue.continue_with(version, self._adapter)
        self.policy = policy
        self._half_loaded = False
        self._updates += 1

    def generate(
        self,
        policy: str,
        prompts: Sequence[Sequence[int]],
        config: GenerationConfig,
        stop_ids: Sequence[int],
        seed: int,
        first: int = 0,
        images: Sequence[Sequence[Path]] = (),
        decoding: Decoding | None = None,
    ) -> Completions:
        """Sample ``config.num_generations`` consecutive completions per prompt, with their texts if there is a ``decoding``.
        Each of ``stop_ids`` ends one. ``images`` are the paths of each prompt's images, if any prompt has some.

        The same arguments give the same tokens, whatever this engine did before: each prompt has its own seed, by its number
        from ``first`` on.
        """
        self._check_policy(policy)
        self._look_for_texts(config)
        # Far apart: vLLM adds 0 to n - 1 to the seed of a prompt for its n completions.
        seeds = [(seed + 104_729 * (first + number)) % 2**31 for number in range(len(prompts))]
        more = {"n": config.num_generations, "logit_bias": self._logit_bias}
        parameters = [parameters_of(config, stop_ids, of_prompt, **more) for of_prompt in seeds]
        return self.queue.complete(prompts, parameters, images, decoding)

    def sample(
        self,
        policy: str,
        requests: Sequence[Request],
        config: GenerationConfig,
        stop_ids: Sequence[int],
        decoding: Decoding | None = None,
    ) -> Completions:
        """One completion for each request, with its text if there is a ``decoding``. The same arguments give the same tokens,
        whatever this engine did before."""
        self._check_policy(policy)
        self._look_for_texts(config)
        parameters = [self._parameters(config, stop_ids, request) for request in requests]
        images = [request.images for request in requests]
        return self.queue.complete([request.prompt_ids for request in requests], parameters, images, decoding)

    def _parameters(self, config: GenerationConfig, stop_ids: Sequence[int], request: Request) -> Any:
        more = {"max_tokens": request.max_tokens, "logit_bias": self._logit_bias}
        return parameters_of(config, stop_ids, request.seed, **more)

    def _look_for_texts(self, config: GenerationConfig) -> None:
        """Give vLLM the tokenizer, which it needs for texts that end completions alone."""
        processor = self.llm.llm_engine.output_processor
        if config.stop and processor.tokenizer is None:
            processor.tokenizer = self._tokenizer()

    def _check_policy(self, policy: str) -> None:
        if policy != self.policy:
            raise RuntimeError(f"engine holds {self.policy or 'half-loaded weights'}, but the request is for {policy}")

    def advance(
        self,
        requests: Sequence[Request],
        config: GenerationConfig,
        stop_ids: Sequence[int],
        seconds: float,
        decoding: Decoding | None = None,
    ) -> list[tuple[str, Completion]]:
        """Add requests to those in progress, and sample for about ``seconds``; returns the completions that are finished, with
        their texts if there is a ``decoding``.

        The others stay in progress, even during an update of the weights.
        """
        self._look_for_texts(config)
        for request in requests:
            self.queue.add(request, self._parameters(config, stop_ids, request))
        return [(name, completion.decoded(decoding)) for name, completion in self.queue.run(seconds)]

    def drop_all(self) -> None:
        """Abort all requests."""
        self.queue.drop_all()

    def release(self, sleep: bool) -> None:
        """Abort a stage's requests, and ``sleep`` if others need the memory until the next stage. Raises RuntimeError for an
        engine whose weights are half loaded."""
        if self._half_loaded:
            raise RuntimeError("the engine holds half-loaded weights")
        self.close_channel()
        self.drop_all()
        if sleep:
            self.sleep()

    def first_parity(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[int],
        images: Sequence[Sequence[Path]] = (),
    ) -> float | None:
        """:meth:`parity` at the first call after a weight update, otherwise None."""
        if self._checked or not self._updates:
            return None
        return self.parity(model, prompts, stop_ids, images)

    def parity(
        self,
        model: Model,
        prompts: Sequence[Sequence[int]],
        stop_ids: Sequence[int],
        images: Sequence[Sequence[Path]] = (),
    ) -> float:
        """Mean difference, in nats, between this engine's log-probabilities of a few short completions and those of
        ``transformers``. ``images`` are the paths of each prompt's images, if any prompt has some."""
        config = GenerationConfig(num_generations=1, max_completion_length=16)
        completions = self.generate(self.policy, prompts, config, stop_ids, seed=0, images=images).each()
        difference = mean_difference(
            model,
            prompts,
            completions,
            self._dtype,
            self._max_model_len,
            self._own_gpu,
            images,
            self._logit_bias or (),
        )
        self._checked = self._updates > 0
        return difference
