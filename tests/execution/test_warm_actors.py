"""Which requests running engines can serve: those for which started ones would sample the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster import device as devices
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device
from alignment_core.execution.warm_actors import WarmActors, shape_of
from alignment_core.inference.engine import EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig

POLICY = Reference("model", "0" * 64)
CPU = Device("cpu", 2)
FACTORS = {"short_factor": [1.0], "long_factor": [2.0]}
LONGROPE: dict[str, dict[str, Any]] = {
    "Phi-3": {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su", **FACTORS}},
    "Phi-4": {"original_max_position_embeddings": 4096, "rope_parameters": {"rope_type": "longrope", **FACTORS}},
    "MiniCPM": {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "none": {"rope_scaling": None},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}},
}


def serves(folder: Path, running: int, length: int) -> bool:
    """Whether an engine that was started for sequences of ``running`` tokens serves a stage with ones of this ``length``."""
    model = Model(folder, POLICY)
    actors = WarmActors(ResourcesConfig(), folder)
    actors._engines_shape = shape_of(EngineRequest(model, running), CPU)
    return actors._engines_serve(shape_of(EngineRequest(model, length), CPU))


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 131_072, **fields}))
    return folder


@pytest.mark.parametrize("fields", LONGROPE.values(), ids=LONGROPE)
def test_an_engine_for_long_sequences_serves_no_short_ones_of_a_model_with_longrope(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM's ``Phi3LongRoPEScaledRotaryEmbedding`` takes the long factors for all sequences if ``max_model_len`` is above
    ``original_max_position_embeddings``, 4,096 here."""
    folder = write(tmp_path, fields)
    assert not serves(folder, running=4097, length=4096)
    assert serves(folder, running=4096, length=1024)
    assert serves(folder, running=8192, length=4097)
    assert not serves(folder, running=4096, length=4097), "it has no room for them"


@pytest.mark.parametrize("fields", OTHERS.values(), ids=OTHERS)
def test_an_engine_of_any_other_model_serves_all_sequences_that_it_has_room_for(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, fields)
    assert serves(folder, running=8192, length=1024)
    assert serves(folder, running=8192, length=8192)
    assert not serves(folder, running=8192, length=8193)


class Group:
    """Actors that record what they would hold, because real ones would load a model."""

    size = 1

    def __init__(self, whole: bool = True) -> None:
        self.whole = whole
        self.killed = False
        self.requests: list[EngineRequest] = []

    def make(self, _factory: str, arguments: list[dict[str, Any]]) -> None:
        self.requests += [of_actor["request"] for of_actor in arguments]

    def is_whole(self) -> bool:
        return self.whole

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize(
    ("multiplies_bf16", "started"), [(True, ["bfloat16", "float32", "bfloat16"]), (False, ["float32"])]
)
def test_engines_start_again_for_a_policy_that_is_trained_in_another_type(
    multiplies_bf16: bool, started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy stored in bf16 is evaluated, trained in fp32, evaluated twice. On a processor without instructions for bf16
    engines compute in fp32 in any case."""
    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: multiplies_bf16)
    group = Group()
    actors = WarmActors(ResourcesConfig(), tmp_path)
    monkeypatch.setattr(actors, "_device", CPU)
    monkeypatch.setattr(actors, "_engine_actors", lambda: group)
    model = Model(write(tmp_path, {"dtype": "bfloat16"}), POLICY)
    for dtype in (None, "float32", None, None):
        actors.ready_engines(EngineRequest(model, 64, dtype))
    assert [request.dtype_on(CPU) for request in group.requests] == started


def test_groups_on_a_cluster_start_on_the_nodes_that_live_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that is bound to a node which was lost would never start."""
    nodes = ["here", "second", "third"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray_cluster, "here_first", lambda _: nodes)
    actors = WarmActors(ResourcesConfig(trainers=2, engines=3), tmp_path)
    actors._device = Device("cpu", 2, private=False)
    assert [place.node for place in actors.layout.places["engines"]] == ["here", "second", "third"]
    nodes.remove("second")
    assert [place.node for place in actors.layout.places["engines"]] == ["here", "third", "here"]
    assert [place.node for place in actors.layout.places["policy"]] == ["here", "third"]


@pytest.mark.parametrize(
    ("address", "whole", "replaced"),
    [("10.0.0.1:6379", False, True), ("10.0.0.1:6379", True, False), ("", False, False)],
    ids=["lost", "whole", "one machine"],
)
def test_warm_groups_of_a_cluster_that_lost_a_node_are_replaced(
    address: str, whole: bool, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine, where an actor that died ended its stage, groups are not checked."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    actors = WarmActors(ResourcesConfig(), tmp_path)
    request = EngineRequest(Model(write(tmp_path, {"dtype": "bfloat16"}), POLICY), 64)
    trainers, engines, started = Group(whole), Group(whole), Group()
    monkeypatch.setattr(actors, "_device", CPU)
    monkeypatch.setattr(actors, "learners", {"policy": trainers})
    monkeypatch.setattr(actors, "engines", engines)
    monkeypatch.setattr(actors, "_engines_shape", shape_of(request, CPU))
    monkeypatch.setattr(actors, "_start_learners", lambda _: started)
    monkeypatch.setattr(actors, "_engine_actors", lambda: started)
    used: list[Any] = [actors.ready_trainers(), actors.ready_engines(request)]
    assert used == ([started, started] if replaced else [trainers, engines])
    assert [trainers.killed, engines.killed] == [replaced, replaced]
    assert started.requests == ([request] if replaced else [])
