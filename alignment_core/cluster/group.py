"""A group of Ray actors, each holding one Python object; the only module besides ``ray_cluster`` that sees Ray."""

from __future__ import annotations

import importlib
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alignment_core.cluster.device import Place
from alignment_core.errors import AlignmentError, DeadlineExceeded, InfrastructureError

PEER_SECONDS = 3.0
RELAYED = 2
"""Payloads between two groups at a time: one is made while the other is taken."""


class _Cell:
    """The actor: makes its object from an import path, so that heavy imports happen in its own process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.object: Any = None

    def __repr__(self) -> str:
        """What Ray puts before each line that this actor prints."""
        return self.name

    def prepare(self, function: str) -> None:
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)()

    def make(self, factory: str, arguments: dict[str, Any]) -> None:
        module, _, name = factory.partition(":")
        self.object = getattr(importlib.import_module(module), name)(**arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return getattr(self.object, method)(*arguments)
        except Exception:
            if hasattr(self.object, "is_lost") and self.object.is_lost():
                os._exit(1)  # whoever waits for it shall see that it is dead
            raise

    def take(self, method: str, payload: Any) -> None:
        """Call ``method`` with what another actor made; Ray brings it, over shared memory on one node."""
        self.call(method, (payload,))

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
    if not place.bundles:
        return {"num_cpus": 0}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        gpus, placement_group_bundle_index=place.bundles[0], placement_group_capture_child_tasks=True
    )
    return {"num_cpus": 0, "num_gpus": place.gpu_share, "scheduling_strategy": strategy}


def _said(method: str, arguments: tuple[Any, ...]) -> str:
    """The call as messages name it: ``do`` only hands on the method that its first argument names."""
    return f"{arguments[0]}" if method == "do" and arguments else method


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether gloo or NCCL lost a peer: it may be seen before Ray knows that the peer is dead."""
    return type(error).__name__.startswith("Dist") or "gloo/transport" in str(error)


class ActorGroup:
    """``size`` actors of one kind. Every wait has a deadline; a dead actor is an InfrastructureError."""

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
        self.broken = False

    def prepare(self, function: str) -> None:
        """Have each actor call ``package.module:function`` ahead of ``make``. Nobody waits; ``make`` shows what fails."""
        for actor in self.actors:
            actor.prepare.remote(function)

    def make(self, factory: str, arguments: Sequence[dict[str, Any]], timeout: float) -> None:
        """Give each actor its object: ``factory`` is ``package.module:Class``."""
        self._wait(
            [actor.make.remote(factory, one) for actor, one in zip(self.actors, arguments, strict=True)],
            timeout,
            "start",
        )

    def rendezvous(self, directory: Path, timeout: float) -> str:
        """Where the actors meet: a file if all are on this node (no open port), otherwise rank 0's address."""
        nodes = self._wait([actor.node.remote() for actor in self.actors], timeout, "placement")
        if set(nodes) == {self.ray.get_runtime_context().get_node_id()}:
            return f"file://{directory / uuid.uuid4().hex}"
        return self._wait([self.actors[0].free_address.remote()], timeout, "rendezvous")[0]

    def all(self, method: str, *arguments: Any, timeout: float) -> list[Any]:
        """Call ``method`` on every actor with the same arguments; results in rank order."""
        references = [actor.call.remote(method, arguments) for actor in self.actors]
        return self._wait(references, timeout, _said(method, arguments))

    def one(self, index: int, method: str, *arguments: Any, timeout: float) -> Any:
        """Call ``method`` on one actor."""
        return self._wait([self.actors[index].call.remote(method, arguments)], timeout, _said(method, arguments))[0]

    def relay(self, calls: Sequence[tuple[str, tuple[Any, ...]]], to: ActorGroup, receive: str, timeout: float) -> None:
        """Make each call (method, arguments) on every actor, and hand what rank 0 gave to ``receive`` of every actor of ``to``.

        Payloads go from actor to actor, never through this process, and at most ``RELAYED`` of them are under way.
        """
        pending: list[tuple[list[Any], list[Any]]] = []
        for method, arguments in calls:
            if len(pending) == RELAYED:
                self._arrived(*pending.pop(0), to, receive, timeout)
            made = [actor.call.remote(method, arguments) for actor in self.actors]
            pending.append((made[1:], [actor.take.remote(receive, made[0]) for actor in to.actors]))
        for made, taken in pending:
            self._arrived(made, taken, to, receive, timeout)

    def _arrived(self, made: list[Any], taken: list[Any], to: ActorGroup, receive: str, timeout: float) -> None:
        self._wait(made, timeout, receive)
        to._wait(taken, timeout, receive)

    def spread(
        self, method: str, jobs: Iterable[tuple[int, tuple[Any, ...]]], timeout: float
    ) -> Iterator[tuple[int, Any]]:
        """Call ``method`` once per (job number, arguments), each on the next idle actor; yields results as they come."""
        waiting = iter(jobs)
        running: dict[Any, tuple[int, int]] = {}
        for index in range(self.size):
            self._send(index, method, waiting, running)
        while running:
            ready = self._ready(list(running), timeout, method, timeout)
            number, index = running.pop(ready)
            result = self._get(ready, method)
            self._send(index, method, waiting, running)
            yield number, result

    def _send(self, index: int, method: str, waiting: Iterator[Any], running: dict[Any, tuple[int, int]]) -> None:
        job = next(waiting, None)
        if job is not None:
            running[self.actors[index].call.remote(method, job[1])] = (job[0], index)

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
            self.broken = True
            raise DeadlineExceeded(
                f"{len(references)} of {self.size} {self.name} did not answer `{what}` within {deadline:g} seconds "
                "(resources.wait_timeout_seconds)"
            )
        return ready[0]

    def _get(self, reference: Any, what: str) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            self.broken = True
            cause = error.cause
            if isinstance(cause, AlignmentError):
                raise cause from error
            self._check_alive(what)  # a peer that dies breaks the collective of the others first
            if _is_of_a_collective(cause):
                raise InfrastructureError(f"{self.name}: a collective broke during `{what}`: {cause}") from error
            print(error, file=sys.stderr)  # the actor's own traceback; the message stays one line
            raise RuntimeError(f"{self.name}: `{what}` failed: {cause!r}") from None
        except self.ray.exceptions.RayError as error:
            self.broken = True
            raise self._death(what, error) from error

    def _death(self, what: str, error: Exception) -> InfrastructureError:
        """Ray's explanation fills a page: the first line goes into the message, all of it into the log."""
        print(error, file=sys.stderr)
        return InfrastructureError(f"{self.name}: an actor died during `{what}`: {str(error).splitlines()[0]}")

    def _check_alive(self, what: str) -> None:
        """Raise InfrastructureError if an actor of the group is dead."""
        for actor in self.actors:
            try:
                self.ray.get(actor.node.remote(), timeout=PEER_SECONDS)
            except self.ray.exceptions.GetTimeoutError:
                continue  # busy, not dead
            except self.ray.exceptions.RayError as error:
                raise self._death(what, error) from error

    def kill(self) -> None:
        """End the actors' processes."""
        for actor in self.actors:
            self.ray.kill(actor)
