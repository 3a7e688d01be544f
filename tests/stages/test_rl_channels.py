"""Reinforcement learning over each kind of channel for weights: the same digests, also after a death in an update."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from alignment_core.recipes import ResourcesConfig
from alignment_core.stages.rl import weights
from tests.matrix import matrix
from tests.stages.conftest import RunRl
from tests.stages.rl_runs import RESOURCES, Section, rewards_small_letters, section_of, two_head_model

pytestmark = pytest.mark.slow

KINDS = ("memory", "broadcast", "ray")
STEPS = 3
SMALL_STEPS = {"bf16": True, "learning_rate": 1e-5, "lr_scheduler_type": "constant"}
"""Training that changes less than half of the weights in a step, so that deltas are sent."""


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return section_of(STEPS, rewards_small_letters(tmp_path), {"max_completion_length": 6}, {"learning_rate": 1e-2})


def over(kind: str, **more: Any) -> ResourcesConfig:
    return RESOURCES.model_copy(update={"weight_transfer": kind, **more})


@pytest.mark.parametrize(
    ("training", "more"),
    [
        pytest.param({}, {}, id="all weights"),
        pytest.param(
            {"lora": {"r": 4}}, {"zero_stage": 3}, id="merged adapters and ZeRO 3", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"lora": {"r": 4, "load_in_4bit": True}}, {}, id="a quantised policy", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_each_channel_gives_the_same_digests(
    training: dict[str, Any], more: dict[str, Any], section: Section, run: RunRl
) -> None:
    section["training"] |= training
    results = {kind: run(section, kind, resources=over(kind, **more))[1] for kind in ("auto", *KINDS)}
    assert all(result.metrics["mismatch"] < 1e-5 for result in results.values()), "the engine samples from the policy"
    assert len({tuple(sorted(result.outputs.items())) for result in results.values()}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("training", "more"),
    [
        pytest.param({}, {}, id="one engine"),
        pytest.param({}, {"engines": 2, "zero_stage": 3}, id="two engines and ZeRO 3"),
        pytest.param({}, {"trainer_tensor_parallel_size": 2}, id="tensor-parallel trainers"),
        pytest.param({"lora": {"r": 4}}, {}, id="merged adapters"),
    ],
)
def test_deltas_give_the_same_digests(
    training: dict[str, Any], more: dict[str, Any], section: Section, run: RunRl, tmp_path: Path
) -> None:
    model = two_head_model(tmp_path / "model")
    section["training"] |= SMALL_STEPS | training
    resources = RESOURCES.model_copy(update=more)
    _, full = run(section, "full", model, resources=resources)
    for kind in KINDS:
        changed = {"weight_transfer": kind, "weight_update_mode": "delta"}
        _, deltas = run(section, kind, model, resources=resources.model_copy(update=changed))
        assert deltas.outputs == full.outputs


@pytest.mark.parametrize("kind", matrix(KINDS, usual=["memory"]))
def test_engines_that_sample_ahead_follow_the_policy(kind: str, section: Section, run: RunRl) -> None:
    section |= {"execution": {"max_staleness": 1}, "steps": 4}
    _, result = run(section, resources=over(kind))
    assert result.metrics["staleness"] <= 1
    assert "restarts" not in result.cost


@pytest.mark.parametrize(
    ("kind", "dies", "mode"),
    matrix(
        KINDS,
        ["engines", "trainers"],
        ["full", "delta"],
        usual=[("memory", "engines", "full"), ("broadcast", "trainers", "full")],
    ),
)
def test_a_death_in_an_update_changes_no_digest(
    kind: str, dies: str, mode: str, section: Section, run: RunRl, actors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "delta":
        section["training"] |= SMALL_STEPS
    _, whole = run(section, "whole")
    updates = []

    def kill_in_the_second(call: Any) -> Any:
        def sending(self: Any, *arguments: Any) -> Any:
            updates.append(kind)
            if len(updates) == 2:
                os.kill(actors()[dies][-1], signal.SIGKILL)
            return call(self, *arguments)

        return sending

    monkeypatch.setattr(weights.WeightSync, "_send_weights", kill_in_the_second(weights.WeightSync._send_weights))
    _, killed = run(section, "killed", resources=over(kind, weight_update_mode=mode))
    assert killed.cost["restarts"] == 1
    assert killed.outputs == whole.outputs


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_whose_copy_differs_gets_all_weights_after_a_restart(
    kind: str, section: Section, run: RunRl, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    section["training"] |= SMALL_STEPS
    _, whole = run(section, "whole")
    send = weights.WeightSync._send_weights
    updates = []

    def change_copy(worker: Any) -> None:
        decoder = worker.delta_decoder or worker.receiver._decoder
        next(iter(decoder._base.values())).view(-1)[0] += 1

    def sending(self: Any, *arguments: Any) -> None:
        updates.append(kind)
        if len(updates) == 2:
            group = machines(2).actors.engines
            change = lambda cell: cell.object.llm.collective_rpc(change_copy)  # noqa: E731
            group.ray.get(group.actors[0].__ray_call__.remote(change))
        send(self, *arguments)

    monkeypatch.setattr(weights.WeightSync, "_send_weights", sending)
    _, changed = run(section, "changed", resources=over(kind, weight_update_mode="delta"))
    assert changed.cost["restarts"] == 1
    assert changed.outputs == whole.outputs


def test_the_error_of_an_engine_is_raised_and_not_its_echo(
    section: Section, run: RunRl, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainers notice that the engine has gone, and say so as well, perhaps earlier."""
    send = weights.WeightSync._send_weights

    def break_engine(cell: Any) -> None:
        call = cell.object.llm.collective_rpc

        def failing(method: str, **arguments: Any) -> Any:
            if method == "begin_update":
                raise ValueError("no layer of this name")
            return call(method, **arguments)

        cell.object.llm.collective_rpc = failing

    def sending(self: Any, *arguments: Any) -> None:
        group = machines(2).actors.engines
        group.ray.get(group.actors[0].__ray_call__.remote(break_engine))
        send(self, *arguments)

    monkeypatch.setattr(weights.WeightSync, "_send_weights", sending)
    with pytest.raises(
        RuntimeError, match=r"^engines: `receive_weights` failed: ValueError\('no layer of this name'\)"
    ):
        run(section, resources=over("memory"))
