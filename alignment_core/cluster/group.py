"""A group of Ray actors, each of which holds one Python object whose methods are called directly."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from alignment_core.cluster.actor import Actor, Call, Guard, call
from alignment_core.cluster.deaths import death
from alignment_core.cluster.device import Place
from alignment_core.cluster.ray_cluster import is_private
from alignment_core.errors import AlignmentError, DeadlineExceeded, InfrastructureError, PeerFailed
from alignment_core.heartbeat import beat

PROBE_SECONDS = 3.0
"""Time for actors to show that they are alive."""
RESET_SECONDS = 5.0
"""Time for running calls to end, after which their actors are killed rather than reused."""
ECHO_SECONDS = 5.0
"""Time for calls that depend on each other to end after one of them failed: the failure that comes first may be an echo."""

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")
P = ParamSpec("P")


class ActorGroup(Generic[T]):
    """Actors that hold a ``T`` each. Every wait has a deadline; a dead actor is an InfrastructureError.

    ``group.all(Trainer.train, steps, seconds)`` calls that method of the :class:`Trainer` in each actor; type checkers see
    its signature.
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        places: Sequence[Place],
        environments: Sequence[dict[str, str]],
        timeout: float,
        gpus: Any = None,
    ) -> None:
        """One actor per place, with environment variables of its own.

        ``timeout`` is the deadline of a call in seconds, and ``gpus`` the placement group.
        """
        self.ray = ray
        self.name = name
        self.size = len(places)
        self.timeout = timeout
        self.actors = [
            ray.remote(Actor)
            .options(runtime_env={"env_vars": environment}, **_options(place, gpus))
            .remote(f"{name}[{rank}]")
            for rank, (place, environment) in enumerate(zip(places, environments, strict=True))
        ]
        self.devices = sum(max(1, len(place.bundles)) for place in places)
        self.elsewhere: tuple[int, ...] = ()
        """The rank of the first actor on each other node that has some; known after the ``rendezvous``."""
        self.on_machine: tuple[int, ...] = (self.size,) * self.size
        """Number of actors on the node of each rank; known after the ``rendezvous``."""
        self._failed = False

    def prepare(self, function: str) -> None:
        """Have each actor call ``package.module:function`` before its next call, without waiting; that shows any failure."""
        for actor in self.actors:
            actor.prepare.remote(function)

    def make(
        self, factory: str | Callable[..., T], arguments: Sequence[dict[str, Any]], guard: Guard = nullcontext
    ) -> None:
        """Give each actor its object, in place of the one before.

        ``factory`` makes it, or is ``package.module:Class`` where only the actor imports it. ``guard`` makes the context in
        which the object is made and its methods are called.
        """
        name = "start" if isinstance(factory, str) else getattr(factory, "__name__", "start")
        pairs = zip(self.actors, arguments, strict=True)
        self._wait([actor.make.remote(factory, of_actor, guard) for actor, of_actor in pairs], name)

    def drop(self) -> None:
        """Close all objects and free their memory."""
        self._wait([actor.drop.remote() for actor in self.actors], "close")

    def run(self, function: Callable[..., object], arguments: Sequence[dict[str, Any]]) -> None:
        """Call a function in each actor's process, with arguments of its own."""
        pairs = zip(self.actors, arguments, strict=True)
        self._wait([actor.run.remote(function, (), of_actor) for actor, of_actor in pairs], function.__name__)

    def run_on(
        self, ranks: Sequence[int], function: Callable[P, R], /, *arguments: P.args, **named: P.kwargs
    ) -> list[R]:
        """Call a function in the processes of these actors at once; results in the order of ``ranks``."""
        requests = [self.actors[rank].run.remote(function, arguments, named) for rank in ranks]
        return self._wait(requests, function.__name__)

    def processor_seconds(self) -> float:
        """Processor time that the actors' processes have used since they started, in seconds, added up over them. Other
        processes on the same cores lengthen a call, but not this."""
        return sum(self.run_on(range(self.size), time.process_time))

    def rendezvous(self, directory: Path) -> str:
        """The rendezvous of the actors: a file if all are on this node (no open port), otherwise rank 0's address. Waits for
        their processes only on a cluster."""
        if not is_private():
            nodes = self.nodes()
            here = self.ray.get_runtime_context().get_node_id()
            self.elsewhere = tuple(nodes.index(node) for node in dict.fromkeys(nodes) if node != here)
            self.on_machine = tuple(nodes.count(node) for node in nodes)
        if not self.elsewhere:
            return f"file://{directory / uuid.uuid4().hex}"
        return self._wait([self.actors[0].free_address.remote()], "rendezvous")[0]

    def all(self, method: Callable[Concatenate[T, P], R], /, *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Call the method of every actor's object; results in rank order."""
        return self.call_all(call(method, *arguments, **named))

    def call_all(self, requested: Call[T, R]) -> list[R]:
        """Make this call on every actor; results in rank order."""
        name = requested.method
        payload: Any = self.ray.put(requested) if self.size > 1 else requested  # travels once to each node
        return self._wait([actor.call.remote(payload) for actor in self.actors], name)

    def one(self, rank: int, method: Callable[Concatenate[T, P], R], /, *arguments: P.args, **named: P.kwargs) -> R:
        """Call the method of one actor's object."""
        return self.one_within(self.timeout, rank, method, *arguments, **named)

    def start(
        self, rank: int, method: Callable[Concatenate[T, P], R], /, *arguments: P.args, **named: P.kwargs
    ) -> Callable[[], R]:
        """Begin the call of ``one``, after those that this actor already has; returns a function that waits for its result."""
        reference = self.actors[rank].call.remote(call(method, *arguments, **named))

        def result() -> R:
            answer: R = self._wait([reference], method.__name__)[0]
            return answer

        return result

    def one_within(
        self,
        seconds: float,
        rank: int,
        method: Callable[Concatenate[T, P], R],
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> R:
        """As ``one``, with a deadline of its own."""
        reference = self.actors[rank].call.remote(call(method, *arguments, **named))
        result: R = self._wait([reference], method.__name__, seconds)[0]
        return result

    def pass_on(self, requested: Call[T, R], to: ActorGroup[U], receive: Callable[[U, R], object]) -> None:
        """Make a call on every actor, and pass rank 0's result to the method ``receive`` of every object of ``to``.

        It goes from actor to actor, never through this process.
        """
        name = receive.__name__
        results = [actor.call.remote(requested) for actor in self.actors]
        received = [actor.call_with.remote(name, results[0]) for actor in to.actors]
        self._wait(results[1:], requested.method)
        to._wait(received, name)

    def started(self, method: Callable[Concatenate[T, P], R], /, *arguments: P.args, **named: P.kwargs) -> Started:
        """Call the method of every actor's object, without waiting: :func:`wait_together` does."""
        requested = call(method, *arguments, **named)
        return Started(self, requested.method, [actor.call.remote(requested) for actor in self.actors])

    def nodes(self) -> list[str]:
        """Ray's ids of the nodes that the actors are on."""
        return self._wait([actor.node.remote() for actor in self.actors], "placement")

    def spread(self, calls: Iterable[tuple[int, Call[T, R]]]) -> Iterator[tuple[int, R]]:
        """Make each numbered call on the next idle actor; yields numbers and results as they come."""
        waiting = iter(calls)
        running: dict[Any, tuple[int, int, str]] = {}
        for rank in range(self.size):
            self._send_next(rank, waiting, running)
        while running:
            _, _, oldest = next(iter(running.values()))
            ready = self._ready(list(running), self.timeout, oldest, self.timeout)
            number, rank, name = running.pop(ready)
            result = self._get(ready, name)
            self._send_next(rank, waiting, running)
            yield number, result

    def _send_next(
        self, rank: int, waiting: Iterator[tuple[int, Call[T, Any]]], running: dict[Any, tuple[int, int, str]]
    ) -> None:
        numbered = next(waiting, None)
        if numbered is not None:
            number, requested = numbered
            running[self.actors[rank].call.remote(requested)] = (number, rank, requested.method)

    def _wait(self, references: list[Any], name: str, timeout: float | None = None) -> list[Any]:
        """All results of the call ``name``; the first failure ends the wait, because its peers may hang in a collective."""
        seconds = self.timeout if timeout is None else timeout
        pending = list(references)
        results: dict[Any, Any] = {}
        deadline = time.monotonic() + seconds
        while pending:
            ready = self._ready(pending, deadline - time.monotonic(), name, seconds)
            results[ready] = self._get(ready, name)
            pending.remove(ready)
        return [results[reference] for reference in references]

    def _ready(self, references: list[Any], left: float, name: str, deadline: float) -> Any:
        """The first reference that is ready within the ``left`` seconds of a wait that had ``deadline`` seconds in all."""
        ready, _ = self.ray.wait(references, num_returns=1, timeout=max(left, 0.0))
        if not ready:
            self._failed = True
            raise DeadlineExceeded(
                f"{len(references)} of {self.size} {self.name} did not answer `{name}` within {deadline:g} seconds "
                "(resources.wait_timeout_seconds)"
            )
        return ready[0]

    def _get(self, reference: Any, name: str) -> Any:
        """A result. Raises errors of this package as they were raised in the actor, InfrastructureError for a dead actor or a
        broken collective, and RuntimeError for anything else."""
        try:
            result = self.ray.get(reference)
            beat()
            return result
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PeerFailed):
                raise cause from error  # these actors are as before
            self._failed = True
            if isinstance(cause, AlignmentError):
                raise cause from error
            # A peer that dies breaks the collective of the others, whose errors may arrive before Ray knows of the death.
            self._check_alive(name)
            if _is_of_a_collective(cause):
                raise InfrastructureError(f"{self.name}: a collective failed during `{name}`: {cause}") from error
            print(error, file=sys.stderr)  # the actor's own traceback; the message stays one line
            raise RuntimeError(f"{self.name}: `{name}` failed: {cause!r}") from None
        except self.ray.exceptions.RayError as error:
            self._failed = True
            raise self._death(name, error, self._deaths()) from error

    def _death(self, name: str, error: Exception, ranks: Iterable[int]) -> InfrastructureError:
        """The error for actors of these ranks, which died; Ray's explanation fills a page and goes into the log."""
        print(error, file=sys.stderr)
        return death(self.name, [f"{self.name}[{rank}]" for rank in ranks], name, error)

    def _deaths(self) -> dict[int, Exception]:
        """The dead actors by rank, and Ray's errors for them. A busy actor does not answer in time and is alive."""
        answers = [actor.node.remote() for actor in self.actors]
        ready, _ = self.ray.wait(answers, num_returns=len(answers), timeout=PROBE_SECONDS)
        deaths: dict[int, Exception] = {}
        for rank, answer in enumerate(answers):
            if answer in ready:
                try:
                    self.ray.get(answer)
                except self.ray.exceptions.RayError as error:
                    deaths[rank] = error
        return deaths

    def is_whole(self) -> bool:
        """Whether no actor is dead."""
        return not self._deaths()

    def _check_alive(self, name: str) -> None:
        """Raise InfrastructureError if an actor of the group is dead."""
        deaths = self._deaths()
        for error in deaths.values():
            raise self._death(name, error, deaths) from error

    def reset(self, requested: Call[T, object] | None = None) -> bool:
        """Reset all actors, by this call or by dropping their objects; True if all answered in time and can be reused.

        They cannot after a call that failed: its peers may hang in a collective.
        """
        if self._failed:
            return False
        name = requested.method if requested else "close"
        try:
            references = [actor.call.remote(requested) if requested else actor.drop.remote() for actor in self.actors]
            self._wait(references, name, RESET_SECONDS)
        except (AlignmentError, RuntimeError):
            return False
        return True

    def discard(self) -> None:
        """Do not reuse these actors after the failure that follows."""
        self._failed = True

    def kill(self) -> None:
        """End the actors' processes."""
        for actor in self.actors:
            self.ray.kill(actor)


@dataclass(frozen=True)
class Started:
    """A call of all actors of a group that is in progress."""

    group: ActorGroup[Any]
    name: str
    """Name of the method."""
    references: list[Any]


def wait_together(*calls: Started) -> None:
    """Wait for calls of several groups that depend on each other. If any fails, the others get ``ECHO_SECONDS`` to end; then
    the first failure is raised, but PeerFailed only if there is no other."""
    pending = {reference: started for started in calls for reference in started.references}
    seconds = max(started.group.timeout for started in calls)
    deadline = time.monotonic() + seconds
    failures: list[Exception] = []
    ray = calls[0].group.ray
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            break
        started = pending.pop(ready[0])
        try:
            started.group._get(ready[0], started.name)
        except (AlignmentError, RuntimeError) as error:
            failures.append(error)
            deadline = min(deadline, time.monotonic() + ECHO_SECONDS)
    for started in pending.values():
        started.group._failed = True
    if failures:
        raise next((error for error in failures if not isinstance(error, PeerFailed)), failures[0])
    if pending:
        names = " and ".join(dict.fromkeys(f"{started.group.name} `{started.name}`" for started in pending.values()))
        raise DeadlineExceeded(f"no answer from {names} within {seconds:g} seconds (resources.wait_timeout_seconds)")


def _options(place: Place, gpus: Any) -> dict[str, Any]:
    """Ray's options for an actor at this place. Its child actors (vLLM's workers) live in the same placement group."""
    if place.node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(place.node, soft=False)}
    if not place.bundles:
        return {"num_cpus": 0}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        gpus, placement_group_bundle_index=place.bundles[0], placement_group_capture_child_tasks=True
    )
    return {"num_cpus": 0, "num_gpus": place.gpu_share, "scheduling_strategy": strategy}


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether gloo or NCCL lost a peer."""
    return type(error).__name__.startswith("Dist") or "gloo/transport" in str(error)
