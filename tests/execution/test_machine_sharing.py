"""A run's trainers and engines when another run requests the machine."""

from __future__ import annotations

import contextlib
import platform
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from alignment_core.artifacts import Reference
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device, cpu_model
from alignment_core.errors import DataError
from alignment_core.execution import warm_actors
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.machines import WarmMachines
from alignment_core.execution.scheduling import RunName, Ticket
from alignment_core.execution.warm_actors import EngineShape
from alignment_core.inference.engine import EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig

SECONDS = 20.0
POLICY = Reference("model", "0" * 64)


class Group:
    """Actors that do nothing: here it matters only when they start and end (and there is no GPU to hold)."""

    devices = size = 2

    def __init__(self) -> None:
        self.killed = threading.Event()
        self.calls: list[str] = []

    def all(self, method: Any, *arguments: Any) -> None:
        self.calls.append(f"{method.__name__} {arguments}")

    def prepare(self, function: str) -> None: ...

    def make(self, *_: Any) -> None: ...

    def drop(self) -> None: ...

    def reset(self, requested: Any = None) -> bool:
        if requested is not None:
            self.calls.append(f"{requested.method} {requested.arguments}")
        return True

    def kill(self) -> None:
        self.killed.set()


def killed(group: Any) -> bool:
    """Whether the actors of a group that a stage held have ended."""
    return group.killed.is_set()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmMachines:
    """A run on GPUs, on a machine that it shares."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "actor_processes", list)
    monkeypatch.setattr(warm_actors, "shape_of", lambda *_: EngineShape("one", "float32", False, 64))
    machines = WarmMachines(ResourcesConfig(trainers=2, engines=2), tmp_path, tmp_path / "locks")
    machines.actors._device = Device("cuda", 2)
    monkeypatch.setattr(machines.actors, "connect", lambda: None)
    monkeypatch.setattr(machines, "_reserve", lambda _: None)
    monkeypatch.setattr(machines.actors, "_start_learners", lambda _: Group())
    monkeypatch.setattr(machines.actors, "_engine_actors", Group)
    return machines


@pytest.mark.parametrize("groups", [(), ("engines",), ("trainers", "engines"), ("engines", "trainers")])
@pytest.mark.parametrize("size", [1, 2])
def test_groups_start_before_the_stages_in_the_given_order(
    run: WarmMachines, monkeypatch: pytest.MonkeyPatch, groups: tuple[str, ...], size: int
) -> None:
    """Engines over two GPUs each do not."""
    started: list[str] = []
    monkeypatch.setattr(run.actors, "_start_learners", lambda _: started.append("trainers") or Group())
    monkeypatch.setattr(run.actors, "_engine_actors", lambda: started.append("engines") or Group())
    run.actors.resources = run.resources.model_copy(update={"tensor_parallel_size": size})
    run.warm_up(groups)
    assert started == [group for group in groups if size == 1 or group == "trainers"]


def test_on_gpus_the_actors_end_before_another_run_has_the_machine(run: WarmMachines, tmp_path: Path) -> None:
    with run.trainers() as trainers:
        pass
    with run.engines(EngineRequest(Model(tmp_path, POLICY), 64)) as engines:
        pass
    with run.trainers() as again:
        assert again.group is trainers.group, "they stay warm while no run waits"
    assert not killed(trainers.group)
    with MachineQueue(tmp_path / "locks").use(Ticket(run=RunName("other"))):
        assert killed(trainers.group)
        assert killed(engines)
    with run.trainers() as fresh:
        assert fresh.group is not trainers.group


@pytest.mark.parametrize(("placement", "sleep"), [("colocated", True), ("disaggregated", False)])
@pytest.mark.parametrize("fails", [False, True])
def test_engines_that_share_gpus_sleep_after_every_stage(
    run: WarmMachines, tmp_path: Path, placement: Any, sleep: bool, fails: bool
) -> None:
    run.actors.resources = run.resources.model_copy(update={"placement": placement})
    run.actors._device = Device("cuda", 4)
    with contextlib.suppress(DataError), run.engines(EngineRequest(Model(tmp_path, POLICY), 64)) as engines:
        if fails:
            raise DataError("a bad row")
    assert engines.calls == ([f"release ({sleep},)"] if sleep or fails else [])  # type: ignore[attr-defined]


def test_engines_that_start_while_another_run_waits_are_not_stuck_with_this_runs_trainers(
    run: WarmMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines start while no stage trains, which a stage must not prevent that itself waits for the machine."""
    trainers_wait, other_waits, other_may_end = threading.Event(), threading.Event(), threading.Event()

    def other_run() -> None:
        with MachineQueue(tmp_path / "locks").use(Ticket(waits=lambda reason: other_waits.set() if reason else None)):
            other_may_end.wait(SECONDS)

    def trainer_stage() -> None:
        with run.trainers(Ticket(order=2, waits=lambda _: trainers_wait.set())):
            pass

    def start_while_all_wait(ticket: Ticket) -> None:
        if ticket.order == 1:  # the engines' stage, which has the machine by now
            for stage, waits in ((other_run, other_waits), (trainer_stage, trainers_wait)):
                threads.append(threading.Thread(target=stage, daemon=True))
                threads[-1].start()
                assert waits.wait(SECONDS)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(run, "_reserve", start_while_all_wait)
    started = threading.Event()

    def engine_stage() -> None:
        with run.engines(EngineRequest(Model(tmp_path, POLICY), 64), Ticket(order=1)):
            started.set()

    threading.Thread(target=engine_stage, daemon=True).start()
    assert started.wait(SECONDS)
    other_may_end.set()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_device_seconds_count_from_having_the_machine_times_the_devices(run: WarmMachines, tmp_path: Path) -> None:
    used: list[float] = []
    with contextlib.suppress(RuntimeError), run.trainers(Ticket(used=used.append)) as trainers:
        threading.Event().wait(0.05)
        raise RuntimeError("also when the stage fails")
    assert killed(trainers.group)
    assert used[0] >= 0.05 * 2
    with MachineQueue(tmp_path / "locks").use(Ticket()):
        waiting = threading.Thread(target=lambda: _take_trainers(run, Ticket(used=used.append)), daemon=True)
        waiting.start()
        threading.Event().wait(0.5)
    waiting.join(SECONDS)
    assert len(used) == 2
    assert used[1] < 0.5 * 2, "waiting for another run is no use of a device"


@pytest.mark.parametrize(
    ("kind", "wanted", "beside"),
    [
        ("cpu", {}, False),
        ("cpu", {"threads": 1}, True),
        ("cuda", {}, False),
        ("cuda", {"placement": "disaggregated"}, True),
    ],
)
def test_a_stage_samples_beside_anothers_training_only_with_cores_or_gpus_of_its_own(
    run: WarmMachines, tmp_path: Path, kind: Literal["cpu", "cuda"], wanted: dict[str, Any], beside: bool
) -> None:
    """One trainer and one engine, on two cores or GPUs."""
    run.actors.resources = ResourcesConfig(trainers=1, engines=1, **wanted)
    run.actors._device = Device(kind, 2)
    samples, reasons = threading.Event(), list[str | None]()

    def sample() -> None:
        with run.engines(EngineRequest(Model(tmp_path, POLICY), 64), Ticket(waits=reasons.append)):
            samples.set()

    engines = threading.Thread(target=sample, daemon=True)
    with run.trainers(Ticket(label="sft")):
        engines.start()
        assert samples.wait(SECONDS if beside else 0.5) is beside
    engines.join(SECONDS)
    assert samples.is_set()
    assert reasons == ([] if beside else ["the trainers, in use by sft", None])


def _take_trainers(run: WarmMachines, ticket: Ticket) -> None:
    with run.trainers(ticket):
        pass


def test_the_record_holds_the_hardware_of_a_stage_and_the_settings_that_change_rounding(
    run: WarmMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "gpu_models", lambda _: ["H100"])
    alone = run.actors.hardware()
    assert alone == {"machine": platform.machine(), "cpu": cpu_model(), "device": "cuda", "devices": 2, "gpu": "H100"}
    halved = run.resources.model_copy(update={"max_tokens_per_microbatch": 512})
    assert run.actors.hardware(halved) == alone | {
        "trainers": 2,
        "engines": 2,
        "tensor_parallel_size": 1,
        "threads": 1,
        "engine_threads": 1,
        "attention": "auto",
        "zero_stage": 2,
        "offload_optimizer": False,
        "max_tokens_per_microbatch": 512,
    }
