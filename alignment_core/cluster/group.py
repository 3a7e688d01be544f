"""A group of Ray actors, each holding one Python object; the only module besides ``ray_cluster`` that sees Ray."""

from __future__ import annotations

import importlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from alignment_core.cluster.deaths import death
from alignment_core.cluster.device import Place
from alignment_core.errors import AlignmentError, DeadlineExceeded, InfrastructureError

PEER_SECONDS = 3.0
LETTING_GO_SECONDS = 5.0
"""How long calls that are still under way may take before their actors are ended rather than kept."""
RELAYED = 2
"""Payloads between two groups at a time: one is made while the other is taken."""

T = TypeVar("T")
U = TypeVar("U")
R = TypeVar("R")
P = ParamSpec("P")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Call(Generic[T_contra, R_co]):
    """A call of a method of an object that lives in an actor; :func:`call` makes one, with the types of that method."""

    method: str
    arguments: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)

    def of(self, target: T_contra) -> R_co:
        """Make the call."""
        result: R_co = getattr(target, self.method)(*self.arguments, **self.named)
        return result

    def __str__(self) -> str:
        """What messages name: where a call only hands another one on, that one."""
        inner = self.arguments[0] if self.arguments else None
        return str(inner) if isinstance(inner, Call) else self.method


def call(method: Callable[Concatenate[T, P], R], /, *arguments: P.args, **named: P.kwargs) -> Call[T, R]:
    """``call(Engine.load, model, policy)``: the method of whatever :class:`Engine` an actor holds."""
    return Call(method.__name__, arguments, named)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class _Cell:
    """The actor: makes its object from an import path, so that heavy imports happen in its own process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.object: Any = None

    def __repr__(self) -> str:
        """What Ray puts before each line that this actor prints."""
        return self.name

    def prepare(self, function: str) -> None:
        _imported(function)()

    def make(self, factory: str | Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.object = (_imported(factory) if isinstance(factory, str) else factory)(**arguments)

    def call(self, asked: Call[Any, Any]) -> Any:
        try:
            return asked.of(self.object)
        except Exception:
            if hasattr(self.object, "is_lost") and self.object.is_lost():
                os._exit(1)  # whoever waits for it shall see that it is dead
            raise

    def take(self, method: str, payload: Any) -> None:
        """Call ``method`` with what another actor made; Ray brings it, over shared memory on one node."""
        self.call(Call(method, (payload,)))

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def free_address(self) -> str:
        import socket

        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


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
    """Whether gloo or NCCL lost a peer: it may be seen before Ray knows that the peer is dead."""
    return type(error).__name__.startswith("Dist") or "gloo/transport" in str(error)


class ActorGroup(Generic[T]):
    """``size`` actors that hold a ``T`` each. Every wait has a deadline; a dead actor is an InfrastructureError.

    Stages do not see it: they are handed a facade with real methods, which knows the deadline
    (:class:`~alignment_core.training.trainers.Trainers`, :class:`~alignment_core.inference.engines.Engines`,
    :class:`~alignment_core.rewards.scoring_actors.Judges`).
    """

    def __init__(
        self, ray: Any, name: str, places: Sequence[Place], environments: Sequence[dict[str, str]], gpus: Any = None
    ) -> None:
        """One actor per place, with environment variables of its own; ``gpus`` is the placement group."""
        self.ray, self.name, self.size = ray, name, len(places)
        self.actors = [
            ray.remote(_Cell).options(runtime_env={"env_vars": one}, **_options(place, gpus)).remote(f"{name}[{rank}]")
            for rank, (place, one) in enumerate(zip(places, environments, strict=True))
        ]
        self.devices = sum(max(1, len(place.bundles)) for place in places)
        self.elsewhere: tuple[int, ...] = ()
        """Of each other node that has actors of this group, the first one, by number; known after the ``rendezvous``."""
        self._failed = False

    def prepare(self, function: str) -> None:
        """Have each actor call ``package.module:function`` ahead of ``make``. Nobody waits; ``make`` shows what fails."""
        for actor in self.actors:
            actor.prepare.remote(function)

    def make(self, factory: str | Callable[..., T], arguments: Sequence[dict[str, Any]], timeout: float) -> None:
        """Give each actor its object: ``factory`` makes it, or is ``package.module:Class`` where only the actor imports it."""
        self._wait(
            [actor.make.remote(factory, one) for actor, one in zip(self.actors, arguments, strict=True)],
            timeout,
            "start",
        )

    def rendezvous(self, directory: Path, timeout: float) -> str:
        """Where the actors meet: a file if all are on this node (no open port), otherwise rank 0's address."""
        nodes = self._wait([actor.node.remote() for actor in self.actors], timeout, "placement")
        here = self.ray.get_runtime_context().get_node_id()
        self.elsewhere = tuple(nodes.index(node) for node in dict.fromkeys(nodes) if node != here)
        if not self.elsewhere:
            return f"file://{directory / uuid.uuid4().hex}"
        return self._wait([self.actors[0].free_address.remote()], timeout, "rendezvous")[0]

    def all(self, asked: Call[T, R], timeout: float, large: bool = False) -> list[R]:
        """Make the call on every actor; results in rank order. A ``large`` one travels once to each node, not to each actor."""
        sent = self.ray.put(asked) if large else asked
        return self._wait([actor.call.remote(sent) for actor in self.actors], timeout, str(asked))

    def one(self, index: int, asked: Call[T, R], timeout: float) -> R:
        """Make the call on one actor."""
        result: R = self._wait([self.actors[index].call.remote(asked)], timeout, str(asked))[0]
        return result

    def relay(
        self, calls: Iterable[Call[T, R]], to: ActorGroup[U], receive: Callable[[U, R], object], timeout: float
    ) -> None:
        """Make each call on every actor, and hand what rank 0 gave to the method ``receive`` of every actor of ``to``.

        Payloads go from actor to actor, never through this process, and at most ``RELAYED`` of them are under way.
        """
        pending: list[tuple[list[Any], list[Any]]] = []
        name = receive.__name__
        for asked in calls:
            if len(pending) == RELAYED:
                self._arrived(*pending.pop(0), to, name, timeout)
            made = [actor.call.remote(asked) for actor in self.actors]
            pending.append((made[1:], [actor.take.remote(name, made[0]) for actor in to.actors]))
        for made, taken in pending:
            self._arrived(made, taken, to, name, timeout)

    def _arrived(self, made: list[Any], taken: list[Any], to: ActorGroup[U], receive: str, timeout: float) -> None:
        self._wait(made, timeout, receive)
        to._wait(taken, timeout, receive)

    def spread(self, calls: Iterable[tuple[int, Call[T, R]]], timeout: float) -> Iterator[tuple[int, R]]:
        """Make each numbered call on the next idle actor; yields numbers and results as they come."""
        waiting = iter(calls)
        running: dict[Any, tuple[int, int, str]] = {}
        for index in range(self.size):
            self._send(index, waiting, running)
        while running:
            what = next(iter(running.values()))[2]
            ready = self._ready(list(running), timeout, what, timeout)
            number, index, what = running.pop(ready)
            result = self._get(ready, what)
            self._send(index, waiting, running)
            yield number, result

    def _send(
        self, index: int, waiting: Iterator[tuple[int, Call[T, Any]]], running: dict[Any, tuple[int, int, str]]
    ) -> None:
        job = next(waiting, None)
        if job is not None:
            number, asked = job
            running[self.actors[index].call.remote(asked)] = (number, index, str(asked))

    def _wait(self, references: list[Any], timeout: float, what: str) -> list[Any]:
        """All results; the first failure ends the wait, because its peers may be stuck in a collective."""
        pending, deadline = list(references), time.monotonic() + timeout
        while pending:
            ready = self._ready(pending, deadline - time.monotonic(), what, timeout)
            self._get(ready, what)
            pending.remove(ready)
        return self.ray.get(references)

    def _ready(self, references: list[Any], left: float, what: str, deadline: float) -> Any:
        """The first reference that is ready within the ``left`` seconds of a wait that had ``deadline`` seconds in all."""
        ready, _ = self.ray.wait(references, num_returns=1, timeout=max(left, 0.0))
        if not ready:
            self._failed = True
            raise DeadlineExceeded(
                f"{len(references)} of {self.size} {self.name} did not answer `{what}` within {deadline:g} seconds "
                "(resources.wait_timeout_seconds)"
            )
        return ready[0]

    def _get(self, reference: Any, what: str) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            self._failed = True
            cause = error.cause
            if isinstance(cause, AlignmentError):
                raise cause from error
            self._check_alive(what)  # a peer that dies breaks the collective of the others first
            if _is_of_a_collective(cause):
                raise InfrastructureError(f"{self.name}: a collective failed during `{what}`: {cause}") from error
            print(error, file=sys.stderr)  # the actor's own traceback; the message stays one line
            raise RuntimeError(f"{self.name}: `{what}` failed: {cause!r}") from None
        except self.ray.exceptions.RayError as error:
            self._failed = True
            raise self._death(what, error, self._deaths()) from error

    def _death(self, what: str, error: Exception, deaths: Iterable[int]) -> InfrastructureError:
        """The error for actors of these ranks, which died; Ray's explanation fills a page and goes into the log."""
        print(error, file=sys.stderr)
        return death(self.name, [f"{self.name}[{rank}]" for rank in deaths], what, error)

    def _deaths(self) -> dict[int, Exception]:
        """The actors that are dead, by rank, and how Ray says it. A busy actor does not answer in time and is alive."""
        answers = [actor.node.remote() for actor in self.actors]
        ready, _ = self.ray.wait(answers, num_returns=len(answers), timeout=PEER_SECONDS)
        deaths: dict[int, Exception] = {}
        for rank, answer in enumerate(answers):
            if answer in ready:
                try:
                    self.ray.get(answer)
                except self.ray.exceptions.RayError as error:
                    deaths[rank] = error
        return deaths

    def _check_alive(self, what: str) -> None:
        """Raise InfrastructureError if an actor of the group is dead."""
        deaths = self._deaths()
        for error in deaths.values():
            raise self._death(what, error, deaths) from error

    def lets_go(self, asked: Call[T, object]) -> bool:
        """Have every actor leave what it is at by this call; whether they are as good as new, and know so soon.

        They are not after a call that failed: its peers may hang in a collective.
        """
        if self._failed:
            return False
        try:
            self.all(asked, LETTING_GO_SECONDS)
        except (AlignmentError, RuntimeError):
            return False
        return True

    def kill(self) -> None:
        """End the actors' processes."""
        for actor in self.actors:
            self.ray.kill(actor)
