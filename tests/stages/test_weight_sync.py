"""What trainers and engines do when the engines get new weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import PeerFailed
from alignment_core.inference.engine import Engine
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.stages.rl import weights
from alignment_core.stages.rl.weights import WeightSync
from alignment_core.training.policy_groups import PolicyGroups
from alignment_core.training.policy_trainer import PolicyTrainer

LORA = {"r": 4, "lora_alpha": 8}


class Group:
    """Actors that record their calls: only the order matters, and the memory is that of a GPU."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def all(self, method: Any, *arguments: Any) -> list[Any]:
        if method is Engine.nodes:
            return [["node"]]
        if method is PolicyTrainer.empty_cache:
            trainer: Any = self
            method(trainer)
        elif method is PolicyTrainer.rest:
            self.calls.append("rest but for the policy" if arguments[0] else "rest")
        else:
            self.calls.append(method.__name__)
        return ["address"]

    def pass_on(self, _call: Any, _to: Any, receive: Any) -> None:
        self.calls.append(receive.__name__)

    def nodes(self) -> list[str]:
        return ["node"]

    def started(self, method: Any, *_: Any) -> str:
        return str(method.__name__)


def context_on(device: str, **resources: Any) -> Any:
    """What is needed of a stage's context on a device of this kind."""
    machines = SimpleNamespace(actors=SimpleNamespace(device=SimpleNamespace(kind=device)))
    return SimpleNamespace(inputs={"policy": Path("policy")}, resources=ResourcesConfig(**resources), machines=machines)


@pytest.mark.parametrize(
    ("step", "rank", "calls"),
    [
        (0, None, ["load"]),
        (3, None, ["open_channel", "open_channel", "receive_weights", "send_weights", "end_update"]),
        (3, 16, ["load", "load_adapter", "use_adapter"]),
    ],
)
def test_trainers_release_the_memory_of_an_update_before_engines_wake_up(
    step: int, rank: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("empty_cache"))
    monkeypatch.setattr("alignment_core.stages.rl.weights.wait_together", lambda *calls: seen.extend(calls))
    section = RlConfig.model_validate(
        {"prompts": "none.jsonl", "rewards": [{"verifier": "task"}], "training": {"lora": LORA}}
    )
    context = context_on("cpu", max_lora_rank=rank)
    group: Any = Group(seen)
    WeightSync(context, section, group, PolicyGroups({"policy": group}), "policy").send(step)
    assert seen == ["empty_cache", *calls]
    seen.clear()
    WeightSync(context, section, group, PolicyGroups({"policy": group}, rests=True), "policy").send(step)
    # The engines allocate their weights in the first of their calls, and their cache in the last one.
    resting = ["rest but for the policy", *calls[:-1], "rest", calls[-1]]
    assert [name for name in seen if name != "empty_cache"] == resting


@pytest.mark.parametrize(
    ("kind", "device", "stay_warm"),
    [("memory", "cuda", False), ("memory", "cpu", True), ("broadcast", "cuda", True)],
)
def test_trainers_whose_gpu_a_dead_engine_had_mapped_are_not_used_again(
    kind: Any, device: str, stay_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their first rank would keep the buffers' memory until its process ends."""

    def fail(*_: Any) -> None:
        raise PeerFailed("an engine ended in the middle of a weight update")

    monkeypatch.setattr(weights, "wait_together", fail)
    engines, trainers = (ActorGroup[Any](None, name, [], [], 1.0) for name in ("engines", "trainers"))
    section: Any = SimpleNamespace(training=SimpleNamespace(lora=None))
    ranks: Any = SimpleNamespace(policy=trainers, empty_cache=lambda: None, rest=lambda keep_policy=False: None)
    sync = WeightSync(context_on(device), section, engines, ranks, "policy")
    sync.channel = kind
    with pytest.raises(PeerFailed):
        sync.send(1)
    assert trainers.reset() is stay_warm
    assert engines.reset(), "its own death is what ends an engine"
