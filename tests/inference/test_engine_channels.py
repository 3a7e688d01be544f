"""Running engines get weights through each kind of channel: their own log-probabilities, and none is half-loaded after a death.

This process is the sender, as rank 0 of the trainers is in a run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.artifacts import Reference
from alignment_core.cluster.actor import call
from alignment_core.cluster.group import ActorGroup, wait_together
from alignment_core.errors import InfrastructureError, PeerFailed
from alignment_core.inference.channels import deltas
from alignment_core.inference.channels.channel import Channel, Sender
from alignment_core.inference.channels.deltas import make_delta
from alignment_core.inference.channels.ray_objects import RaySender
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.adapters import merged
from alignment_core.models.model_ref import Model
from alignment_core.models.saving import save_checkpoint
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.models.weight_transfer import WeightStream
from alignment_core.recipes import GenerationConfig, LoraConfig
from tests.inference.test_engine_mixtures import MIXTURES
from tests.matrix import matrix
from tests.models.test_adapters import adapted

pytestmark = pytest.mark.slow

KINDS = ("memory", "broadcast", "ray")
POLICY = {name: Reference.parse(f"model@sha256:{name * 64}") for name in "ab"}
PROMPTS = [[72, 101, 108], [1, 2, 3, 4, 5], list(range(40))]
Weights = Iterable[tuple[str, torch.Tensor]]
Connect = Callable[..., Callable[[Weights, int], None]]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Opens a channel to engines; what it returns sends weights as a version of the policy."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with ExitStack() as open_ones:

        def connect(
            kind: Any, engines: ActorGroup[Engine], sends_deltas: bool = False
        ) -> Callable[[Weights, int], None]:
            if kind == "ray":
                begin = call(Engine.begin_delta) if sends_deltas else None
                by_ray = RaySender(engines.actors, Engine.load_bucket.__name__, 60.0, begin)

                def push(weights: Weights, version: int) -> None:
                    engines.all(Engine.begin_update)
                    by_ray.send(weights)
                    engines.all(Engine.end_update, str(POLICY["a"]), version)

                return push
            workers = sum(map(len, engines.all(Engine.nodes)))
            channel = Channel(kind, workers, seconds=60.0, bucket_bytes=50_000, sends_deltas=sends_deltas)
            sender = Sender(channel)
            open_ones.callback(sender.close)
            engines.all(Engine.open_channel, channel, sender.address)

            def send(weights: Weights, version: int) -> None:
                receiving = engines.started(Engine.receive_weights)
                try:
                    sender.send(weights)
                finally:
                    wait_together(receiving)
                engines.all(Engine.end_update, str(POLICY["a"]), version)

            return send

        yield connect


@pytest.fixture
def stream() -> Callable[[Path], WeightStream]:
    """The weights of a folder, as rank 0 of the trainers has them."""
    return lambda path: WeightStream(transformers.AutoModelForCausalLM.from_pretrained(path), rank=0, zero_stage=0)


def sampled(engines: ActorGroup[Engine]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of completions of fixed seeds."""
    config = GenerationConfig(num_generations=2, max_completion_length=8)
    completions = engines.one(0, Engine.generate, str(POLICY["a"]), PROMPTS, config, [257], 5)
    return [(completion.token_ids.tolist(), completion.logps.tolist()) for completion in completions.each()]


def trained(model: Path, steps: int, folder: Path) -> list[Path]:
    """A model after each of some steps, in which one weight in fifty changes."""
    weights = transformers.AutoModelForCausalLM.from_pretrained(model)
    noise = torch.Generator().manual_seed(0)
    after = []
    for step in range(steps):
        for parameter in weights.parameters():
            chosen = torch.rand(parameter.shape, generator=noise) < 0.02
            parameter.data[chosen] += 0.1
        after.append(folder / f"step-{step}")
        save_checkpoint(weights, model, after[-1], weights.state_dict())
    return after


def difference(engines: ActorGroup[Engine], model: Path, rank: int = 0) -> float:
    """Mean difference of log-probabilities from those of ``transformers``, in nats."""
    difference = engines.one(rank, Engine.parity, Model(model, POLICY["a"]), PROMPTS, [257])
    assert difference is not None
    return difference


@pytest.mark.parametrize(
    ("kind", "shape"),
    matrix(
        KINDS,
        [("llama", True), ("qwen2", False)],
        usual=[*((kind, ("llama", True)) for kind in KINDS), ("memory", ("qwen2", False))],
    ),
)
def test_each_update_gives_its_own_log_probabilities(
    shape: tuple[str, bool], kind: str, machines: Any, tiny_model: Any, connect: Connect, stream: Any
) -> None:
    models = {name: tiny_model(*shape, seed=seed) for seed, name in enumerate("ab")}
    with machines(1).engines(EngineRequest(Model(models["a"], POLICY["a"]), 128)) as engines:
        send = connect(kind, engines)
        for version, name in enumerate("bab"):
            send(stream(models[name]).tensors(), version)
            assert difference(engines, models[name]) < 1e-4
            assert difference(engines, models["a" if name == "b" else "b"]) > 1e-3


@pytest.mark.parametrize(("kind", "shards"), matrix(KINDS, [1, 2], usual=[("ray", 1)]))
def test_deltas_give_the_log_probabilities_of_full_updates(
    kind: str,
    shards: int,
    machines: Any,
    tiny_model: Any,
    connect: Connect,
    stream: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    are_deltas: list[bool] = []

    def recorded(base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
        delta = make_delta(base, tensor)
        are_deltas.append(delta is not None)
        return delta

    monkeypatch.setattr(deltas, "make_delta", recorded)
    start = tiny_model("llama", True, seed=0)
    models = [start, *trained(start, 3, tmp_path)]
    with machines(1, tensor_parallel_size=shards).engines(EngineRequest(Model(start, POLICY["a"]), 128)) as engines:
        by_mode = []
        for sends_deltas in (False, True):
            send = connect(kind, engines, sends_deltas)
            of_steps = []
            for version, model in enumerate(models):
                send(stream(model).tensors(), version)
                of_steps.append(sampled(engines))
            by_mode.append(of_steps)
        assert by_mode[0] == by_mode[1]
        assert len({str(of_step) for of_step in by_mode[0]}) == len(models)
        assert are_deltas == [True] * 3 * len(dict(stream(start).tensors()))
        assert difference(engines, models[-1]) < 1e-4


@pytest.mark.parametrize("kind", matrix(KINDS, usual=["ray"]))
def test_merged_adapters_reach_an_engine(
    kind: str, machines: Any, tiny_model: Any, connect: Connect, tmp_path: Path
) -> None:
    start = tiny_model(seed=1)
    model = adapted(start, LoraConfig(r=4), seed=3)
    save_checkpoint(model, start, tmp_path / "merged", merged(model, model.state_dict()))
    with machines(1).engines(EngineRequest(Model(start, POLICY["a"]), 128)) as engines:
        connect(kind, engines)(WeightStream(model, rank=0, zero_stage=0).tensors(), 1)
        assert difference(engines, tmp_path / "merged") < 1e-4
        assert difference(engines, start) > 1e-3


@pytest.mark.parametrize("kind", matrix(KINDS, usual=["broadcast"]))
def test_an_engine_packs_the_experts_of_a_mixture_again(
    kind: str, machines: Any, connect: Connect, stream: Any, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    for seed, name in enumerate("ab"):
        config = MIXTURES["qwen3"].to_dict() | {"vocab_size": len(tokenizer)}
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(MIXTURES["qwen3"].__class__.from_dict(config))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    with machines(1).engines(EngineRequest(Model(tmp_path / "a", POLICY["a"]), 128)) as engines:
        send = connect(kind, engines)
        for version, name in enumerate("ba"):
            send(stream(tmp_path / name).tensors(), version)
            assert difference(engines, tmp_path / name) < 1e-4


@pytest.mark.parametrize("kind", matrix(KINDS, usual=["memory", "broadcast"]))
def test_both_workers_of_a_parallel_engine_take_their_part(
    kind: str, machines: Any, tiny_model: Any, connect: Connect, stream: Any
) -> None:
    models = {name: tiny_model("llama", True, seed=seed) for seed, name in enumerate("ab")}
    parallel = machines(1, tensor_parallel_size=2)
    with parallel.engines(EngineRequest(Model(models["a"], POLICY["a"]), 128)) as engines:
        send = connect(kind, engines)
        for version, name in enumerate("ba"):
            send(stream(models[name]).tensors(), version)
            assert difference(engines, models[name]) < 1e-4


@pytest.mark.parametrize("kind", matrix(KINDS, usual=["memory"]))
def test_missing_weights_are_named_at_the_end_of_an_update(
    kind: str, machines: Any, tiny_model: Any, connect: Connect, stream: Any
) -> None:
    model = tiny_model("llama", True, seed=0)
    with machines(1).engines(EngineRequest(Model(model, POLICY["a"]), 128)) as engines:
        weights = [weight for weight in stream(model).tensors() if "layers.1.mlp.down" not in weight[0]]
        with pytest.raises(RuntimeError, match=r"had no weights for model\.layers\.1\.mlp\.down_proj\.weight"):
            connect(kind, engines)(weights, 1)
        engines.all(Engine.load, model, "again")
        engines._failed = False  # it was this test's own


@pytest.mark.parametrize("kind", matrix(["memory", "broadcast"], usual=["broadcast"]))
def test_weights_that_an_engine_cannot_load_end_the_sender(
    kind: str, machines: Any, tiny_model: Any, connect: Connect, stream: Any
) -> None:
    model = tiny_model("llama", True, seed=0)
    wrong = [(name, tensor.repeat(2, *[1] * (tensor.ndim - 1))) for name, tensor in stream(model).tensors()]

    def update() -> None:
        with machines(1).engines(EngineRequest(Model(model, POLICY["a"]), 128)) as engines:
            connect(kind, engines)(wrong, 1)

    with pytest.raises(RuntimeError, match=r"^engines: `receive_weights` failed: ") as raised:
        update()
    assert isinstance(raised.value.__context__, PeerFailed), "the sender's own error"
    assert str(raised.value.__context__).startswith("an engine failed in a weight update: ")


@pytest.mark.parametrize(
    ("kind", "sends_deltas"),
    matrix(KINDS, [False, True], usual=[("memory", False), ("broadcast", False)]),
)
def test_an_engine_that_is_killed_in_an_update_is_replaced(
    kind: str, sends_deltas: bool, machines: Any, tiny_model: Any, connect: Connect, stream: Any
) -> None:
    models = {name: tiny_model("llama", True, seed=seed) for seed, name in enumerate("ab")}
    request = EngineRequest(Model(models["a"], POLICY["a"]), 128)
    two = machines(1, engines=2)

    def killed_after(count: int, weights: Weights, pid: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number, weight in enumerate(weights):
            if number == count:
                os.kill(pid, signal.SIGKILL)
            yield weight

    def update() -> None:
        with two.engines(request) as engines:
            send = connect(kind, engines, sends_deltas)
            send(stream(models["a"]).tensors(), 0)
            pids = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in engines.actors]
            send(killed_after(3, stream(models["b"]).tensors(), engines.ray.get(pids[1])), 1)

    with pytest.raises(InfrastructureError, match=r"\ban engine died|engines\[1\]"):
        update()
    assert two.actors.engines is None, "the other one is half-loaded"
    with two.engines(request) as engines:
        send = connect(kind, engines, sends_deltas)
        send(stream(models["b"]).tensors(), 1)
        assert [difference(engines, models["b"], rank) < 1e-4 for rank in range(2)] == [True, True]
