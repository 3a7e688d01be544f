"""Access to a run's actors: by one stage at a time each, and on a machine's devices by one run at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from alignment_core.artifacts.workspace import Workspace
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.actor import Call, call
from alignment_core.cluster.group import ActorGroup
from alignment_core.errors import AlignmentError, DeadlineExceeded
from alignment_core.execution.machine_queue import MachineQueue
from alignment_core.execution.scheduling import FIRST, START_OF_ACTORS, OrderedLock, Ticket
from alignment_core.execution.warm_actors import WarmActors
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.recipes import ResourcesConfig
from alignment_core.training.ranks import TrainerActors

T = TypeVar("T")

SERVES = "[align] {group} serve {label}"
"""Printed when a stage takes a group: by it the log attributes the actors' output."""


class WarmMachines:
    """Hands the trainer ranks and vLLM engines of a run to its stages. Use from several threads; ``close`` ends all actors.

    Stages cannot deadlock, because each takes what it needs in one call and in one order: the trainers, the engines, the
    machine's devices, and last the locks that are held briefly. A stage that has the devices therefore never waits for one
    that has not; see docs/design.md.
    """

    def __init__(
        self, resources: ResourcesConfig, temporary: Path, locks: Path | None = None, shared: Workspace | None = None
    ) -> None:
        """``locks`` is the folder over which the runs of this machine queue for it; None means that there are no others.
        ``shared`` is the workspace of a store in a folder, which all nodes of a cluster have to see."""
        self.actors = WarmActors(resources, temporary, shared)
        self._queue = MachineQueue(locks, self.actors.release_devices) if locks and ray_cluster.is_private() else None
        self._processor = OrderedLock("the processor")
        self._trainers = OrderedLock("the trainers")
        self._engines = OrderedLock("the engines")
        self._reserving = OrderedLock("the GPUs")
        self._this_thread = _ThreadState()
        self._counting = threading.Lock()
        self._users = 0
        """Stages that use a cluster's GPUs or wait for them."""
        self._deferring = 0
        """Stages that wait for another run."""

    @property
    def resources(self) -> ResourcesConfig:
        """The run's settings."""
        return self.actors.resources

    def close(self) -> None:
        """End all actors, and Ray if this process started it. May be called again."""
        self.actors.close()

    # ---------------------------------------------------------------- what stages take

    def processor(self, ticket: Ticket = FIRST) -> AbstractContextManager[Callable[[], None]]:
        """The host process's own Python: two busy stages at once would only slow the first one down.

        Call what this yields now and then: an earlier stage that waits goes first.
        """
        return self._processor.hold(ticket)

    @contextmanager
    def trainers(self, ticket: Ticket = FIRST) -> Iterator[TrainerActors]:
        """The trainer ranks, for the caller alone. A group in which an actor died is replaced at the next call."""
        with self._acquired(ticket, trainers=True), self._serving_trainers(ticket) as trainers:
            yield trainers

    @contextmanager
    def engines(self, request: EngineRequest, ticket: Ticket = FIRST) -> Iterator[ActorGroup[Engine]]:
        """Engines that hold a policy, for the caller alone: warm ones load its weights, if the architecture agrees."""
        with self._acquired(ticket, engines=True), self._serving_engines(request, ticket) as engines:
            yield engines

    @contextmanager
    def engines_and_trainers(
        self, request: EngineRequest, ticket: Ticket = FIRST
    ) -> Iterator[tuple[ActorGroup[Engine], TrainerActors]]:
        """Both, for the caller alone."""
        with (
            self._acquired(ticket, engines=True, trainers=True),
            self._serving_engines(request, ticket) as engines,
            self._serving_trainers(ticket) as trainers,
        ):
            yield engines, trainers

    def warm_up(self, groups: Sequence[str]) -> None:
        """Start ``trainers`` and ``engines``, in this order, before a stage needs them: it takes seconds. Of engines only the
        processes and their imports start, and nothing waits for these.

        Does nothing while another run has the machine.
        """
        ticket = Ticket(label=START_OF_ACTORS)
        starts = {
            "trainers": (self._trainers, self.actors.ready_trainers),
            "engines": (self._engines, self.actors.prepare_engines),
        }
        for group in groups:
            # An engine over several GPUs sees other GPUs from its first import on, so its imports wait for its placement.
            if group == "engines" and self.resources.tensor_parallel_size > 1:
                continue
            lock, start = starts[group]
            with lock.hold(ticket), self._devices_if_free(ticket) as free:
                if free:
                    start()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """While a stage of this run waits for another run: release the GPUs of a cluster that no stage of this run uses,
        because the other run may itself wait for them."""
        with self._counting:
            self._deferring += 1
            self._release_if_idle()
        try:
            yield
        finally:
            with self._counting:
                self._deferring -= 1

    # ---------------------------------------------------------------- locks and devices

    @contextmanager
    def _acquired(self, ticket: Ticket, engines: bool = False, trainers: bool = False) -> Iterator[None]:
        """The right to use the groups, and their devices. Raises RuntimeError if the calling thread already has any."""
        if self._this_thread.has_actors:
            raise RuntimeError("a stage takes trainers and engines in one call, or two stages may wait for each other")
        with ExitStack() as acquired:
            if trainers or self.actors.take_turns:
                acquired.enter_context(self._trainers.hold(ticket))
            if engines:
                acquired.enter_context(self._engines.hold(ticket))
            acquired.enter_context(self._devices(ticket))
            self._this_thread.has_actors = True
            try:
                yield
            finally:
                self._this_thread.has_actors = False

    @contextmanager
    def _devices(self, ticket: Ticket) -> Iterator[None]:
        """The devices of this machine for this run; on a cluster Ray hands them out."""
        with self._queue.use(ticket) if self._queue else self._counted_user():
            self._reserve(ticket)
            yield

    @contextmanager
    def _devices_if_free(self, ticket: Ticket) -> Iterator[bool]:
        with self._queue.use_if_free(ticket) if self._queue else self._counted_user() as free:
            if free:
                self._reserve(ticket)
            yield bool(free)

    def _reserve(self, ticket: Ticket) -> None:
        if self.actors.gpus_needed:
            with self._reserving.hold(ticket):
                self.actors.reserve(ticket.waits)

    @contextmanager
    def _counted_user(self) -> Iterator[bool]:
        """While a stage uses this run's GPUs of a cluster, or waits for them."""
        with self._counting:
            self._users += 1
        try:
            yield True
        finally:
            with self._counting:
                self._users -= 1
                self._release_if_idle()

    def _release_if_idle(self) -> None:
        if self._queue is None and self.actors.gpus is not None and self._deferring and not self._users:
            self.actors.release_devices()

    # ---------------------------------------------------------------- groups in use

    @contextmanager
    def _serving_trainers(self, ticket: Ticket) -> Iterator[TrainerActors]:
        started = time.monotonic()
        _print_stage("trainers", ticket)
        with ticket.starting("the trainers"):
            group = self.actors.ready_trainers()
        groups = self.actors.learners  # and others that the stage starts
        try:
            yield TrainerActors(group, self.actors.device, self.actors.ready_learners)
            for group in self.actors.learners.values():
                group.drop()
        except BaseException as error:
            warm = [_stays_warm(group, error) for group in self.actors.learners.values()]
            if not all(warm):
                self.actors.end_trainers()
            raise
        finally:
            ticket.used((time.monotonic() - started) * sum(group.devices for group in groups.values()))

    @contextmanager
    def _serving_engines(self, request: EngineRequest, ticket: Ticket) -> Iterator[ActorGroup[Engine]]:
        started = time.monotonic()
        _print_stage("engines", ticket)
        with ticket.starting("the engines, and loads their model"):
            group = self.actors.ready_engines(request)
        sleep = self.actors.engines_give_way
        try:
            yield group
            if sleep:
                group.all(Engine.release, sleep)
        except BaseException as error:
            if not _stays_warm(group, error, call(Engine.release, sleep)):
                self.actors.end_engines()
            raise
        finally:
            ticket.used((time.monotonic() - started) * group.devices)


class _ThreadState(threading.local):
    """Of each thread: whether it has trainers or engines."""

    has_actors = False


def _print_stage(group: str, ticket: Ticket) -> None:
    print(SERVES.format(group=group, label=ticket.label), flush=True)


def _stays_warm(group: ActorGroup[T], error: BaseException, reset: Call[T, object] | None = None) -> bool:
    """Whether the next stage may use these actors although their stage ended in this error.

    It may where the error came from something else, such as a reward or the other group. A deadline that has passed ends all
    actors of the stage: a call may still hang in them.
    """
    came_from_elsewhere = isinstance(error, AlignmentError) and not isinstance(error, DeadlineExceeded)
    return came_from_elsewhere and group.reset(reset)
