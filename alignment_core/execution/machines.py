"""The actors that the stages of one run share: started on first use, kept warm, one stage at a time each."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from alignment_core.cluster import ray_cluster
from alignment_core.cluster.actor import Call, call
from alignment_core.cluster.device import Device, Place, cpu_model
from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.nodes import check_nodes
from alignment_core.errors import AlignmentError, DeadlineExceeded
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.scheduling import FIRST, START_OF_ACTORS, OrderedLock, Ticket
from alignment_core.inference.engine import Engine
from alignment_core.inference.engines import EngineRequest, Engines
from alignment_core.models.saving import architecture_digest
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.scoring_actors import Judges
from alignment_core.training.ranks import TrainerActors, join
from alignment_core.user_code.nodes import POOL, NodePool, Nodes
from alignment_core.user_code.pool import PoolJob

if TYPE_CHECKING:
    from alignment_core.training.forward import Forward, ForwardJob

T = TypeVar("T")

COMPARED = ("torch", "transformers", "deepspeed", "vllm", "ray", "datasets", "numpy", "pyarrow", "peft", "safetensors")
"""Packages that every node of a cluster must have in the same version."""
ENGINE, ENGINE_IMPORTS = "alignment_core.inference.engine:Engine", "alignment_core.inference.engine:prepare"
SERVES = "[align] {group} serve {label}"
"""Printed when a stage takes a group, so that a reader of the log knows for whom its actors speak from there on."""


class WarmMachines:
    """Trainer ranks and vLLM engines over Ray. Use from several threads; ``close`` ends all actors.

    A stage takes all that it needs in one call, and in one order: the trainers, the engines, the machine's devices, and
    then what is held for moments only. A stage that has the devices so waits for none that has not; see docs/design.md.
    """

    def __init__(self, resources: ResourcesConfig, temporary: Path, locks: Path | None = None) -> None:
        """``locks`` is the folder over which the runs of this machine queue for it; none means that there are no others."""
        self.resources = resources
        self.temporary = temporary
        self._queue = MachineQueue(locks, self._give_up) if locks and ray_cluster.is_private() else None
        self._starting = threading.Lock()
        self._processor, self._reserving = OrderedLock("the processor"), OrderedLock("the GPUs")
        self._for_trainers, self._for_engines = OrderedLock("the trainers"), OrderedLock("the engines")
        self._still = OrderedLock("the GPUs")
        self._holding = _Holding()
        self._use = threading.Lock()
        self._users, self._deferring = 0, 0
        """Stages that use a cluster's GPUs or wait for them, and stages that wait for another run."""
        self._ray: Any = None
        self._gpus: Any = None
        self._device: Device | None = None
        self._trainers: ActorGroup[Any] | None = None
        self._engines: ActorGroup[Engine] | None = None
        self._engines_shape: tuple[str, int] | None = None
        """What the engines hold; none while they have no model yet."""

    @property
    def _timeout(self) -> float:
        return self.resources.wait_timeout_seconds

    @property
    def device(self) -> Device:
        """What the actors run on."""
        self.connect()
        assert self._device is not None
        return self._device

    def hardware(self, resources: ResourcesConfig | None = None) -> dict[str, Any]:
        """What provenance says about where a stage ran; with its ``resources``, if it used trainers or engines."""
        found: dict[str, Any] = {"machine": platform.machine(), "cpu": cpu_model()}
        found |= {"device": self.device.kind, "devices": self.device.count}
        if self.device.kind == "cuda":
            found["gpu"] = ", ".join(ray_cluster.gpu_models(self._ray))
        return found | (self.device.rounding(resources) if resources else {})

    def connect(self) -> Any:
        """Connect to Ray, or start it. Call it first from the main thread, while no other thread runs: Ray forks, and a
        fork beside a thread that holds a lock (imports do) may hang."""
        with self._starting:
            if self._device is None:
                self._ray = ray_cluster.connect(self.temporary)
                device = Device.detect(self.resources.device, ray_cluster.gpus(self._ray), ray_cluster.is_private())
                device.gpus_needed(self.resources)  # too few are said now
                if not ray_cluster.is_private():
                    check_nodes(self._ray, COMPARED, self._timeout)
                self._device = device
            return self._ray

    @contextmanager
    def processor(self, ticket: Ticket = FIRST) -> Iterator[Callable[[], None]]:
        """The host process's own Python: two busy stages at once would only slow the first one down.

        Call what this yields now and then: an earlier stage that waits goes first.
        """
        with self._processor.hold(ticket) as give_way:
            yield give_way

    @contextmanager
    def trainers(self, ticket: Ticket = FIRST) -> Iterator[TrainerActors]:
        """The trainer ranks, for the caller alone. A group in which an actor died is replaced at the next call."""
        with self._taken(ticket, trainers=True), self._serving_trainers(ticket) as trainers:
            yield trainers

    @contextmanager
    def engines(self, request: EngineRequest, ticket: Ticket = FIRST) -> Iterator[Engines]:
        """Engines that hold a policy, for the caller alone: warm ones take its weights, if the architecture agrees."""
        with self._taken(ticket, engines=True), self._serving_engines(request, ticket) as engines:
            yield engines

    @contextmanager
    def engines_and_trainers(
        self, request: EngineRequest, ticket: Ticket = FIRST
    ) -> Iterator[tuple[Engines, TrainerActors]]:
        """Both, for the caller alone."""
        with (
            self._taken(ticket, engines=True, trainers=True),
            self._serving_engines(request, ticket) as engines,
            self._serving_trainers(ticket) as trainers,
        ):
            yield engines, trainers

    @contextmanager
    def _taken(self, ticket: Ticket, engines: bool = False, trainers: bool = False) -> Iterator[None]:
        """The right to use them, and the devices that they run on. Raises RuntimeError if the caller has any already."""
        if self._holding.on:
            raise RuntimeError("a stage takes trainers and engines in one call, or two stages may wait for each other")
        with ExitStack() as held:
            if trainers:
                held.enter_context(self._for_trainers.hold(ticket))
            if engines:
                held.enter_context(self._for_engines.hold(ticket))
            held.enter_context(self._machine(ticket))
            held.enter_context(self._holding)
            yield

    @contextmanager
    def _serving_trainers(self, ticket: Ticket) -> Iterator[TrainerActors]:
        with self._still.hold(ticket):
            started = time.monotonic()
            _say_whom_it_serves("trainers", ticket)
            with ticket.starting("the trainers"):
                group = self._ready_trainers()
            try:
                yield TrainerActors(group, self.device)
                group.drop()
            except BaseException as error:
                if not _stays_warm(group, error):
                    group.kill()
                    self._trainers = None
                raise
            finally:
                ticket.used((time.monotonic() - started) * group.devices)

    @contextmanager
    def _serving_engines(self, request: EngineRequest, ticket: Ticket) -> Iterator[Engines]:
        started = time.monotonic()
        _say_whom_it_serves("engines", ticket)
        # vLLM measures what is free on its GPU while it starts; trainers on the same one must keep still.
        alone = self._still.hold(ticket) if self.device.kind == "cuda" else nullcontext()
        with ticket.starting("the engines, and loads their model"):
            group = self._ready_engines(request, alone)
        sleep = self.device.engines_give_way(self.resources)
        try:
            yield Engines(group)
            if sleep:
                group.all(Engine.let_go, sleep)
        except BaseException as error:
            if not _stays_warm(group, error, call(Engine.let_go, sleep)):
                self._end_engines()
            raise
        finally:
            ticket.used((time.monotonic() - started) * group.devices)

    def warm_up(self, engines: bool) -> None:
        """Start the trainers and, if asked, the engines' processes before a stage asks for them: it takes seconds.

        Not while another run has the machine.
        """
        ticket = Ticket(label=START_OF_ACTORS)
        with self._for_trainers.hold(ticket), self._machine_if_free(ticket) as free:
            if free:
                self._ready_trainers()
        if not engines or self.resources.tensor_parallel_size > 1:  # which sees other GPUs from its first import on
            return
        with self._for_engines.hold(ticket), self._machine_if_free(ticket) as free:
            if free and self._engines is None:
                self._engines = self._engine_actors()
                self._engines.prepare(ENGINE_IMPORTS)

    @contextmanager
    def _machine(self, ticket: Ticket) -> Iterator[None]:
        """The devices of this machine for this run; on a cluster Ray hands them out."""
        with self._queue.use(ticket) if self._queue else self._cluster():
            self._reserve(ticket)
            yield

    @contextmanager
    def _machine_if_free(self, ticket: Ticket) -> Iterator[bool]:
        with self._queue.use_if_free(ticket) if self._queue else self._cluster() as free:
            if free:
                self._reserve(ticket)
            yield bool(free)

    @contextmanager
    def _cluster(self) -> Iterator[bool]:
        """A stage that uses what this run has of a cluster, or waits for it."""
        with self._use:
            self._users += 1
        try:
            yield True
        finally:
            with self._use:
                self._users -= 1
                self._give_up_if_idle()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """While a stage of this run waits for another run, which may itself wait for the GPUs that this one has of a cluster:
        it keeps none that no stage uses."""
        with self._use:
            self._deferring += 1
            self._give_up_if_idle()
        try:
            yield
        finally:
            with self._use:
                self._deferring -= 1

    def _give_up_if_idle(self) -> None:
        if self._queue is None and self._gpus is not None and self._deferring and not self._users:
            self._give_up()

    def _ready_trainers(self) -> ActorGroup[Any]:
        if self._trainers is None:
            self._trainers = self._start_trainers()
        return self._trainers

    def _reserve(self, ticket: Ticket) -> None:
        """Have this run's GPUs from Ray, if it needs any."""
        needed = self.device.gpus_needed(self.resources)
        if not needed:
            return
        with self._reserving.hold(ticket):
            if self._gpus is None:
                self._gpus = ray_cluster.reserve_gpus(self._ray, needed, ticket.waits)

    def _give_up(self) -> None:
        """Leave the GPUs to another run, with all their memory. On a CPU idle actors are in nobody's way."""
        if self._device is None or self._device.kind == "cpu":
            return
        processes = ray_cluster.actor_processes()
        self._end_actors()
        ray_cluster.wait_for_the_end(processes)

    def _end_actors(self) -> None:
        if self._trainers is not None:
            self._trainers.kill()
            self._trainers = None
        self._end_engines()
        if self._gpus is not None:
            self._ray.util.remove_placement_group(self._gpus)
            self._gpus = None

    def _end_engines(self) -> None:
        if self._engines is not None:
            self._engines.kill()
            self._engines = self._engines_shape = None

    def _over_nodes(self, places: list[Place]) -> list[Place]:
        """On a cluster without GPUs: over its nodes in turn, this one first."""
        if ray_cluster.is_private() or self.device.kind != "cpu":
            return places
        nodes = ray_cluster.here_first(self._ray)
        return [replace(place, node=nodes[index % len(nodes)]) for index, place in enumerate(places)]

    def _start_trainers(self) -> ActorGroup[Any]:
        world = self.device.trainers(self.resources)
        places = self._over_nodes([self.device.trainer_place(rank) for rank in range(world)])
        environment = self.device.trainer_environment(self.resources)
        group: ActorGroup[Any] = self._group("trainers", places, [environment] * world)
        with _killed_on_failure(group):
            rendezvous = group.rendezvous(self.temporary)
            shared = {"world": world, "rendezvous": rendezvous, "resources": self.resources, "device": self.device}
            group.run(join, [{"rank": rank, **shared} for rank in range(world)])
        return group

    @contextmanager
    def judges(self, name: str, job: ForwardJob, resources: ResourcesConfig) -> Iterator[Judges]:
        """Actors of a reward model, for as long as the caller needs them; hold trainers or engines while you do."""
        places = self._over_nodes(
            [self.device.judge_place(index, self.resources) for index in range(self.resources.judges)]
        )
        environment = self.device.trainer_environment(self.resources)
        group: ActorGroup[Forward] = self._group(name, places, [environment] * len(places))
        try:
            arguments = {"resources": resources, "device": self.device}
            group.make(job.open, [arguments] * group.size)
            yield Judges(group)
        finally:
            group.kill()

    def elsewhere(self, job: PoolJob) -> Nodes | None:
        """Pools of a user's function on the cluster's other nodes; None on one machine."""
        nodes = [] if ray_cluster.is_private() else ray_cluster.other_nodes(self.connect())
        if not nodes:
            return None
        places = [Place(node=node) for node in nodes]
        group: ActorGroup[NodePool] = self._group("rewards", places, [{}] * len(places))
        with _killed_on_failure(group):
            group.make(POOL, [{"job": job}] * group.size)
        return Nodes(group, self._timeout)

    def _serves(self, shape: tuple[str, int]) -> bool:
        """Whether the running engines have this architecture and room for sequences of this length."""
        assert self._engines_shape is not None
        return self._engines_shape[0] == shape[0] and self._engines_shape[1] >= shape[1]

    def _engine_actors(self) -> ActorGroup[Engine]:
        device, resources = self.device, self.resources
        places = self._over_nodes([device.engine_place(index, resources) for index in range(device.engines(resources))])
        environments = [device.engine_environment(resources, place) for place in places]
        return self._group("engines", places, environments)

    def _group(self, name: str, places: list[Place], environments: list[dict[str, str]]) -> ActorGroup[Any]:
        return ActorGroup(self._ray, name, places, environments, self._timeout, self._gpus)

    def _ready_engines(self, request: EngineRequest, alone: AbstractContextManager[Any]) -> ActorGroup[Engine]:
        """Engines of this architecture; those that start, start in the context ``alone``, with the policy."""
        shape = (architecture_digest(request.policy.path), request.max_model_len)
        if self._engines_shape and not self._serves(shape):
            self._end_engines()
        if self._engines is None:
            self._engines = self._engine_actors()
        if self._engines_shape is None:
            arguments = {
                "policy": request.policy,
                "max_model_len": request.max_model_len,
                "resources": self.resources,
                "device": self.device,
            }
            try:
                with alone:
                    self._engines.make(ENGINE, [arguments] * self._engines.size)
            except BaseException:
                self._end_engines()
                raise
            self._engines_shape = shape
        return self._engines

    def close(self) -> None:
        """End all actors, and Ray if this process started it. May be called again."""
        if self._ray is not None:
            self._end_actors()
            self._ray.shutdown()
            self._ray = self._device = None


class _Holding(threading.local):
    """Whether the thread holds trainers or engines."""

    on = False

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False


def _say_whom_it_serves(group: str, ticket: Ticket) -> None:
    print(SERVES.format(group=group, label=ticket.label), flush=True)


def _stays_warm(group: ActorGroup[T], error: BaseException, reset: Call[T, object] | None = None) -> bool:
    """Whether the next stage may use these actors, though the one that had them ended in this error: somebody else's, such as
    a reward's or that of the other group. A deadline that has passed ends all that the stage had."""
    somebody_elses = isinstance(error, AlignmentError) and not isinstance(error, DeadlineExceeded)
    return somebody_elses and group.reset(reset)


@contextmanager
def _killed_on_failure(group: ActorGroup[Any]) -> Iterator[None]:
    """A group that did not start as a whole is no use, and its half-started ranks wait for each other."""
    try:
        yield
    except BaseException:
        group.kill()
        raise
