"""The actors that the stages of one run share: started on first use, kept warm, one stage at a time each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device
from alignment_core.cluster.group import ActorGroup
from alignment_core.models.saving import architecture_digest
from alignment_core.recipes import ResourcesConfig

TRAINER = "alignment_core.training.worker:TrainWorker"
ENGINE = "alignment_core.rollout.engine:Engine"


class WarmMachines:
    """Trainer ranks and vLLM engines over Ray. Use from several threads; ``close`` ends all actors."""

    def __init__(self, resources: ResourcesConfig, temporary: Path) -> None:
        self.resources = resources
        self.temporary = temporary
        self.device = Device.detect(resources.device)
        self._starting, self._processor_lock = threading.Lock(), threading.Lock()
        self._trainers_lock, self._engines_lock = threading.Lock(), threading.Lock()
        self._ray: Any = None
        self._trainers: ActorGroup | None = None
        self._engines: ActorGroup | None = None
        self._engines_shape: tuple[str, int] | None = None

    @property
    def _timeout(self) -> float:
        return self.resources.wait_timeout_seconds

    def _group(self, role: Any, size: int, environment: dict[str, str]) -> ActorGroup:
        return ActorGroup(
            self.connect(), f"{role}s", size, self.device.actor_options(role, self.resources), environment
        )

    @contextmanager
    def processor(self) -> Iterator[None]:
        """The host process's own Python: two busy stages at once would only slow the first one down."""
        with self._processor_lock:
            yield

    @contextmanager
    def trainers(self) -> Iterator[ActorGroup]:
        """The trainer ranks, for the caller alone. A group in which an actor died is replaced at the next call."""
        with self._trainers_lock:
            if self._trainers is None:
                self._trainers = self._start_trainers()
            group = self._trainers
            try:
                yield group
                group.all("close", timeout=self._timeout)
            except BaseException:
                group.kill()  # peers may hang in a collective
                self._trainers = None
                raise

    def connect(self) -> Any:
        """Connect to Ray, or start it. Call it first from the main thread, while no other thread runs: Ray forks, and a
        fork beside a thread that holds a lock (imports do) may hang."""
        with self._starting:
            self._ray = ray_cluster.connect(self.temporary)
            return self._ray

    def warm_up(self) -> None:
        """Start the trainers before a stage asks for them: nearly every run needs them, and it takes seconds."""
        with self._trainers_lock:
            if self._trainers is None:
                self._trainers = self._start_trainers()

    def _start_trainers(self) -> ActorGroup:
        world = self.device.trainers(self.resources)
        group = self._group("trainer", world, self.device.trainer_environment(self.resources))
        with _killed_on_failure(group):
            rendezvous = group.rendezvous(self.temporary, self._timeout)
            shared = {"world": world, "rendezvous": rendezvous, "resources": self.resources, "device": self.device}
            group.make(TRAINER, [{"rank": rank, **shared} for rank in range(world)], self._timeout)
        return group

    @contextmanager
    def engines(
        self, model: Path, policy: Reference, max_model_len: int, trust_remote_code: bool = False
    ) -> Iterator[ActorGroup]:
        """Engines that hold ``policy``, for the caller alone: warm ones take its weights, if the architecture agrees."""
        with self._engines_lock:
            shape = (architecture_digest(model), max_model_len)
            if self._engines is not None and not self._serves(shape):
                self._engines.kill()
                self._engines = None
            if self._engines is None:
                self._engines = self._start_engines(model, policy, max_model_len, trust_remote_code)
                self._engines_shape = shape
            group = self._engines
            try:
                yield group
            except BaseException:
                group.kill()
                self._engines = None
                raise

    def _serves(self, shape: tuple[str, int]) -> bool:
        """Whether the running engines have this architecture and room for sequences of this length."""
        assert self._engines_shape is not None
        return self._engines_shape[0] == shape[0] and self._engines_shape[1] >= shape[1]

    def _start_engines(self, model: Path, policy: Reference, max_model_len: int, trust_remote_code: bool) -> ActorGroup:
        size = self.device.engines(self.resources)
        group = self._group("engine", size, self.device.engine_environment(self.resources))
        arguments = {
            "model": str(model),
            "policy": str(policy),
            "max_model_len": max_model_len,
            "resources": self.resources,
            "device": self.device,
            "trust_remote_code": trust_remote_code,
        }
        with _killed_on_failure(group):
            group.make(ENGINE, [arguments] * size, self._timeout)
        return group

    def close(self) -> None:
        """End all actors, and Ray if this process started it. May be called again."""
        groups, self._trainers, self._engines = (self._trainers, self._engines), None, None
        for group in groups:
            if group is not None:
                group.kill()
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None


@contextmanager
def _killed_on_failure(group: ActorGroup) -> Iterator[None]:
    """A group that did not start as a whole is no use, and its half-started ranks wait for each other."""
    try:
        yield
    except BaseException:
        group.kill()
        raise
