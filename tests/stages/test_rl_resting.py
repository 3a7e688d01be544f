"""The rl stage with trainers that rest while its engines sample: the same models, also after kills and stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.cluster.device import Device
from alignment_core.errors import OutOfMemory, Stopped, UserError
from alignment_core.execution.base import StageCall
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig, RlConfig
from alignment_core.rollout.sampling import SyncSampler
from alignment_core.stages.rl import RlStageConfig
from alignment_core.stages.rl.loop import Loop
from alignment_core.training.policy_groups import PolicyGroups
from tests.matrix import matrix
from tests.stages.killing import Killer, store_with
from tests.stages.rl_runs import RESOURCES, Section, prompts, rewards_small_letters, section_of
from tests.stages.test_rl_channels import KINDS, SMALL_STEPS

STEPS = 4
RESTING = RESOURCES.model_copy(update={"offload_while_sampling": True})
GRPO = {"kl": {"coefficient": 0.1}}
PPO = {
    **GRPO,
    "advantage": {"estimator": "gae", "whiten": "mean-and-deviation"},
    "critic": {"learning_rate": 1e-3, "normalise": True},
    "ema": {"decay": 0.5},
    "best": {"prompts": "none.jsonl", "eval_steps": 1},
}
ALGORITHMS: dict[str, Section] = {"GRPO": GRPO, "PPO": PPO}
ADAPTERS = {"training": {"lora": {"r": 4}}, "best": PPO["best"]}
Run = Callable[..., Any]


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return section_of(
        STEPS,
        rewards_small_letters(tmp_path),
        generation={"max_completion_length": 6, "shard_size": 1},
        training={"learning_rate": 1e-3, "adam_epsilon": 1e-5, "save_steps": 2},
    )


@pytest.fixture
def run(section: Section, machines: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The stage's outputs; an equal ``rerun`` resumes a run that did not end."""
    store, policy, data = store_with(tmp_path / "run", tiny_model(), prompts())
    rests: list[bool] = []
    rest = PolicyGroups.rest
    monkeypatch.setattr(
        PolicyGroups, "rest", lambda groups, *_, **more: rests.append(groups.rests) or rest(groups, **more)
    )

    def run(
        rerun: str, resources: ResourcesConfig = RESTING, reporter: Any = lambda *_: None, stopping: Any = None
    ) -> Any:
        rests.clear()
        config = RlStageConfig(section=RlConfig.model_validate(section)).model_dump(mode="json")
        inputs = {"policy": policy, "prompts": data, **({"held_out": data} if "best" in section else {})}
        call = StageCall(stage="rl", label="rl", config=config, inputs=inputs, rerun=rerun)
        event = stopping or threading.Event()
        engines = {"max_lora_rank": resources.max_lora_rank} if resources.max_lora_rank else {}
        result = run_stage(StageRequest(store, call, machines(2, **engines), resources, reporter, stopping=event))
        assert set(rests) == {bool(resources.offload_while_sampling)}
        return result.outputs

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "resources"),
    [
        pytest.param(GRPO, {"zero_stage": 0}, id="GRPO", marks=pytest.mark.exhaustive),
        pytest.param(GRPO, {"zero_stage": 3}, id="GRPO in parts"),
        pytest.param(PPO, {"zero_stage": 2}, id="PPO with the best policy"),
        pytest.param(ADAPTERS, {"max_lora_rank": 16}, id="GRPO of adapters", marks=pytest.mark.exhaustive),
    ],
)
def test_trainers_that_rest_while_engines_sample_train_the_same_models(
    algorithm: dict[str, Any], resources: dict[str, Any], section: Section, run: Run
) -> None:
    training = {**section["training"], **algorithm.get("training", {})}
    section |= {**algorithm, "training": training}
    awake, resting = (of.model_copy(update=resources) for of in (RESOURCES, RESTING))
    assert run("resting", resting) == run("awake", awake)


@pytest.mark.slow
@pytest.mark.parametrize("kind", matrix(KINDS, usual=["memory"]))
def test_deltas_reach_engines_that_lose_their_weights_in_sleep(
    kind: str, section: Section, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's do on GPUs; on a CPU it drops nothing itself."""
    section["training"] |= SMALL_STEPS
    section |= {"best": PPO["best"]}
    sent: list[str] = []

    def lose_weights(worker: Any) -> list[str]:
        """Returns the kinds of the items of all updates since the first call with an open channel."""
        model = worker.model_runner.get_model()
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        for layer in model.modules():
            if hasattr(layer, "cpu_linear"):
                layer.cpu_linear = None  # it has a copy of the weights that the CPU's kernels packed
        decoder = worker.delta_decoder or (worker.receiver and worker.receiver._decoder)
        if decoder is None:
            return []
        if not hasattr(decoder, "kinds"):
            decode, kinds = decoder.decode, decoder.__dict__.setdefault("kinds", [])

            def recorded(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
                for item, tensor in items:
                    kinds.append(item.partition(":")[0])
                    yield item, tensor

            decoder.decode = lambda items: decode(recorded(items))
        return list(decoder.kinds)

    def releasing(sampler: SyncSampler) -> None:
        release(sampler)
        engines = sampler.sampling.engines
        lose = lambda cell: cell.object.llm.collective_rpc(lose_weights)  # noqa: E731
        ((sent[:],),) = engines.ray.get([actor.__ray_call__.remote(lose) for actor in engines.actors])

    full = run("awake", RESOURCES)
    release = SyncSampler.release
    monkeypatch.setattr(SyncSampler, "release", releasing)
    deltas = RESTING.model_copy(update={"weight_update_mode": "delta", "weight_transfer": kind})
    assert run("deltas", deltas) == full
    assert "delta" in sent
    assert "whole" not in sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dies"), matrix(["GRPO", "PPO"], ["trainers", "engines"], usual=[("PPO", "trainers")])
)
def test_a_killed_run_resumes_from_the_checkpoint_before_its_trainers_rested(
    name: str, dies: str, section: Section, run: Run, machines: Any
) -> None:
    section |= ALGORITHMS[name]
    killer = Killer(machines(2), dies, at=2)
    assert run("killed", reporter=killer) == run("undisturbed")
    assert killer.done == [0, 1, 2, 2, 3, 4]


@pytest.mark.slow
def test_a_run_that_is_stopped_while_its_trainers_rest_saves_their_step(section: Section, run: Run) -> None:
    section |= GRPO
    stopping = threading.Event()
    seldom = RESTING.model_copy(update={"progress_seconds": 600.0})  # a checkpoint only because of the stop
    again: list[float] = []
    with pytest.raises(Stopped):
        run("stopped", seldom, lambda done, *_: stopping.set() if done == 2 else None, stopping)
    resumed = run("stopped", seldom, lambda done, *_: again.append(done))
    assert again[0] == 2
    assert resumed == run("undisturbed", seldom)


def test_a_stop_has_the_engines_free_their_memory_if_trainers_cannot_wake_beside_them() -> None:
    calls: list[str] = []

    def wake() -> None:
        calls.append("wake")
        if "release" not in calls:
            raise OutOfMemory("the engines have it")

    loop: Any = object.__new__(Loop)
    loop.ranks = SimpleNamespace(wake=wake)
    loop.sampler = SimpleNamespace(release=lambda: calls.append("release"))
    loop._state = dict
    loop._save = lambda step, state: calls.append(f"save {step}")
    with pytest.raises(Stopped), loop._saved_if_stopped(3):
        raise Stopped("stopped while it sampled")
    assert calls == ["wake", "release", "wake", "save 3"]


@pytest.mark.parametrize(
    ("max_staleness", "kind", "fields", "rests"),
    [
        (0, "cuda", {}, True),
        (0, "cuda", {"offload_while_sampling": False}, False),
        (0, "cuda", {"placement": "disaggregated"}, False),
        (0, "cpu", {}, False),
        (0, "cpu", {"offload_while_sampling": True}, True),
        (1, "cuda", {}, False),
        (1, "cuda", {"offload_while_sampling": True}, None),
    ],
)
def test_trainers_rest_where_engines_that_take_turns_with_them_share_their_gpus(
    max_staleness: int, kind: Any, fields: dict[str, Any], rests: bool | None
) -> None:
    device = Device(kind, 8)
    refused: Any = pytest.raises(UserError, match="max_staleness") if rests is None else nullcontext()
    with refused:
        assert device.trainers_rest(ResourcesConfig(**fields), max_staleness) is rests


def test_trainers_with_gpus_of_their_own_cannot_rest() -> None:
    with pytest.raises(ValueError, match="needs `placement: colocated`"):
        ResourcesConfig(placement="disaggregated", offload_while_sampling=True)
