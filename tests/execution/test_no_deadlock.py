"""Two runs on one machine, one of them with reinforcement learning: both finish under any interleaving of steps."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from alignment_core.artifacts import Reference, open_store
from alignment_core.artifacts.workspace import Workspace
from alignment_core.cluster import layout, ray_cluster
from alignment_core.cluster.device import Device
from alignment_core.execution import machine_queue, scheduling, warm_actors
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.machines import WarmMachines
from alignment_core.execution.runner import _claimed
from alignment_core.execution.scheduling import FIRST, OrderedLock, RunName, Ticket
from alignment_core.execution.warm_actors import EngineShape
from alignment_core.inference.engine import EngineRequest
from alignment_core.models.model_ref import Model
from alignment_core.recipes import ResourcesConfig

SECONDS = 20.0
QUIET_SECONDS = 0.002
"""Seconds after which a released stage is considered waiting; they decide coverage, not success."""
POLICY = EngineRequest(Model(Path("policy"), Reference("model", "0" * 64)), 64)
APART = {"critic": {"gpus": 1}, "reference": {"gpus": 1}}
"""Models with process groups of their own."""


@contextmanager
def reinforcement_learning(machines: WarmMachines, ticket: Ticket) -> Iterator[None]:
    """Takes engines and trainers, and starts the ranks of models that have their own."""
    with machines.engines_and_trainers(POLICY, ticket) as (_, trainers):
        for role in layout.groups_of(machines.resources):
            trainers.learners(role)
        yield


Take = Callable[[WarmMachines, Ticket], AbstractContextManager[Any]]
TAKES: dict[str, Take] = {
    "rl": reinforcement_learning,
    "score": lambda machines, ticket: machines.trainers(ticket),
    "generate": lambda machines, ticket: machines.engines(POLICY, ticket),
}


class Group:
    """Actors that do nothing: only their holders matter here, and there is no GPU to hold."""

    devices = size = 1

    def all(self, *_: Any) -> None: ...

    make = drop = kill = all


class Script:
    """Lets stages take their next steps in a given order, as far as they are not waiting for each other."""

    def __init__(self, order: tuple[str, ...]) -> None:
        self._order = order
        self._condition = threading.Condition()
        self._at_gate: dict[str, bool] = {}
        """Stages that stand before a step, and whether they may take it."""
        self._open = False

    def gate(self) -> None:
        """Called by a stage before each of its steps."""
        name = threading.current_thread().name
        with self._condition:
            if self._open or name not in self._order:
                return
            self._at_gate[name] = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._open or self._at_gate[name])
            del self._at_gate[name]

    def play(self) -> None:
        """Let one stage after the other take a step; one that waits for another is passed over."""
        for name in self._order:
            with self._condition:
                if self._condition.wait_for(lambda name=name: name in self._at_gate, QUIET_SECONDS):  # type: ignore[misc]
                    self._at_gate[name] = True
                    self._condition.notify_all()
        with self._condition:
            self._open = True
            self._condition.notify_all()


@pytest.fixture
def new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WarmMachines]]:
    """A run on the machine that all runs of a test share, with its models as ``resources.models`` places them."""
    runs: list[WarmMachines] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "actor_processes", list)
    monkeypatch.setattr(warm_actors, "shape_of", lambda *_: EngineShape("one", "float32", False, 64))
    monkeypatch.setattr(machine_queue, "POLL_SECONDS", 0.001)

    def make(device: Literal["cpu", "cuda"], models: Any = None) -> WarmMachines:
        resources = ResourcesConfig(models=models or {})
        machines = WarmMachines(resources, tmp_path, tmp_path / "locks")
        machines.actors._device = Device(device, 1 + layout.gpus_apart(resources))
        monkeypatch.setattr(machines, "_reserve", lambda _: None)
        for name, fake in (
            ("connect", lambda: None),
            ("_start_learners", lambda _: Group()),
            ("_engine_actors", Group),
        ):
            monkeypatch.setattr(machines.actors, name, fake)
        runs.append(machines)
        return machines

    yield make
    monkeypatch.setattr(MachineQueue, "_another_is_first", lambda _: True)  # so that they give up the machine, and end
    for machines in runs:
        assert machines._queue is not None
        with machines._queue._condition:
            assert machines._queue._condition.wait_for(lambda queue=machines._queue: queue._lock is None, SECONDS)  # type: ignore[misc]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Script], None]:
    """Puts a script's gate before every place where a stage may begin to wait."""

    def put(script: Script) -> None:
        def gated(original: Any) -> Any:
            def call(*arguments: Any) -> Any:
                script.gate()
                return original(*arguments)

            return call

        monkeypatch.setattr(scheduling.OrderedLock, "_enter", gated(ENTER))
        monkeypatch.setattr(machine_queue.MachineQueue, "_slot", gated(SLOT))

    return put


ENTER, SLOT = OrderedLock._enter, MachineQueue._slot


def play(
    runs: dict[str, WarmMachines],
    stages: dict[str, tuple[str, str]],
    script: Script,
    claim: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> list[str]:
    """Run all ``stages`` (a run, and the actors that it takes) concurrently; returns those that do not finish."""

    def stage(name: str, number: int) -> None:
        run, kind = stages[name]
        with claim(kind), TAKES[kind](runs[run], Ticket(number, label=name, run=RunName(run))):
            pass

    threads = [
        threading.Thread(target=stage, args=(name, number), name=name, daemon=True)
        for number, name in enumerate(stages)
    ]
    for thread in threads:
        thread.start()
    script.play()
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return [thread.name for thread in threads if thread.is_alive()]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("beside", ["score", "generate"])
@pytest.mark.parametrize("models", [None, APART], ids=["one group", "groups of their own"])
def test_reinforcement_learning_beside_another_run_comes_to_an_end(
    models: Any, beside: str, device: str, new_run: Any, hook: Any
) -> None:
    """The stage that takes engines and trainers, another stage of its run, and a stage of another run."""
    stages = {"rl": ("ours", "rl"), "beside": ("ours", beside), "other": ("theirs", "score")}
    runs = {name: new_run(device, models) for name in ("ours", "theirs")}
    steps = ("rl",) * 3 + ("beside",) * 2 + ("other",) * 2
    for order in sorted(set(itertools.permutations(steps))):
        script = Script(order)
        hook(script)
        stuck = play(runs, stages, script)
        assert not stuck, f"{stuck} wait for each other after {order}"


def test_runs_that_share_stages_come_to_an_end(new_run: Any, hook: Any, tmp_path: Path) -> None:
    """Each run has the same two stages: the second run waits for the first to finish a stage, without holding the machine."""
    workspace = Workspace(tmp_path / "store")

    @contextmanager
    def claim(stage: str) -> Iterator[None]:
        script.gate()
        with workspace.claim(stage.encode().hex().ljust(64, "0"), lambda _: None, "a run"):
            yield

    runs = {name: new_run("cpu") for name in ("ours", "theirs")}
    stages = {f"{run} {kind}": (run, kind) for run in ("ours", "theirs") for kind in ("rl", "score")}
    steps = [name for name, (_, kind) in stages.items() for _ in range(4 if kind == "rl" else 3)]
    random = Random(1)
    for _ in range(100):
        random.shuffle(steps)
        script = Script(tuple(steps))
        hook(script)
        stuck = play(runs, stages, script, claim)
        assert not stuck, f"{stuck} wait for each other after {steps}"


def test_waiting_runs_on_a_cluster_hold_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU: a run that has it waits for a stage of another one, which waits for the GPU."""
    gpu, store = Gpu(), open_store(tmp_path / "store")
    monkeypatch.setattr(ray_cluster, "reserve_gpus", gpu.reserve)
    monkeypatch.setattr(ray_cluster, "reserved_gpus", lambda *_: [layout.Gpu("node", 0)])
    monkeypatch.setattr(ray_cluster, "is_private", lambda: False)
    monkeypatch.setattr(ray_cluster, "actor_processes", list)
    ours, theirs = (WarmMachines(ResourcesConfig(), tmp_path) for _ in range(2))
    for machines in (ours, theirs):
        machines.actors._device, machines.actors.ray = Device("cuda", 1), SimpleNamespace(util=gpu)
        monkeypatch.setattr(machines.actors, "_start_learners", lambda _: Group())
    with ours.trainers():
        pass  # and the run keeps its GPU for the next stage

    def stage(machines: WarmMachines) -> None:
        with _claimed(store, "0" * 64, machines, FIRST), machines.trainers():
            pass
        machines.actors.end_actors()  # the end of the run

    stages = [threading.Thread(target=stage, args=(machines,), daemon=True) for machines in (theirs, ours)]
    stages[0].start()
    assert gpu.wanted.wait(SECONDS), "it has claimed the key by then"
    stages[1].start()
    for thread in stages:
        thread.join(SECONDS)
        assert not thread.is_alive()


class Gpu:
    """The one GPU of a cluster, as Ray hands it out."""

    def __init__(self) -> None:
        self._free, self.wanted = threading.Semaphore(1), threading.Event()

    def reserve(self, *_: Any) -> str:
        if not self._free.acquire(blocking=False):
            self.wanted.set()
            assert self._free.acquire(timeout=SECONDS)
        return "the GPU"

    def remove_placement_group(self, _: str) -> None:
        self._free.release()


def test_a_stage_with_trainers_that_takes_engines_is_refused(new_run: Any) -> None:
    machines = new_run("cpu")
    with machines.trainers(), pytest.raises(RuntimeError, match="in one call"), machines.engines(POLICY):
        pass
    with machines.engines(POLICY):
        pass
