"""The actors of one run over Ray: started on first use, kept warm from stage to stage, ended together."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from alignment_core.artifacts.workspace import Workspace
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device, cpu_model, is_sharded
from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.layout import ActorLayout, Gpu, LearnerRole, Place, place_models
from alignment_core.cluster.nodes import check_nodes
from alignment_core.inference.engine import Engine, EngineRequest
from alignment_core.models.saving import architecture_digest, read_json
from alignment_core.recipes import ResourcesConfig
from alignment_core.rewards.scoring_actors import Judges
from alignment_core.training.ranks import join
from alignment_core.user_code.pool import POOL, NodePool, Nodes, PoolJob

if TYPE_CHECKING:
    from alignment_core.training.forward import Forward, ForwardJob

COMPARED = ("torch", "transformers", "deepspeed", "vllm", "ray", "datasets", "numpy", "pyarrow", "peft", "safetensors")
"""Packages that every node of a cluster must have in the same version."""
ENGINE = "alignment_core.inference.engine:Engine"
ENGINE_IMPORTS = "alignment_core.inference.engine:prepare"
TRAINER_IMPORTS = "alignment_core.training.imports:prepare"


class EngineShape(NamedTuple):
    """What an engine cannot change while it runs."""

    architecture: str
    dtype: str
    """Float type in which it computes."""
    long_rope: bool
    """Whether it samples all sequences with LongRoPE's factors for long ones; see :func:`_uses_long_rope`."""
    max_model_len: int


def shape_of(request: EngineRequest, device: Device) -> EngineShape:
    """The shape of an engine that is started for this request."""
    folder = request.policy.path
    length = request.max_model_len
    return EngineShape(
        architecture_digest(folder),
        request.dtype_on(device),
        _uses_long_rope(read_json(folder / "config.json"), length),
        length,
    )


def _uses_long_rope(shape: dict[str, Any], length: int) -> bool:
    """Whether an engine of a model with this ``config.json`` and this ``max_model_len`` uses LongRoPE's factors for long
    sequences. vLLM decides that when the engine starts, for short sequences, too."""
    shape = {**shape, **(shape.get("text_config") or {})}
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) not in ("longrope", "su"):
        return False
    # In this order, as `transformers` reads them (`standardize_rope_params`).
    first = shape.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return first is not None and length > int(first)


class WarmActors:
    """Connects to Ray, and starts and ends groups of actors. :class:`~.machines.WarmMachines` decides which stage uses them."""

    def __init__(self, resources: ResourcesConfig, temporary: Path, shared: Workspace | None = None) -> None:
        """``shared``: the workspace of a store in a folder, which all nodes of a cluster have to see."""
        self.resources = resources
        self._shared = shared
        self.temporary = temporary
        self.ray: Any = None
        self.gpus: Any = None
        """The placement group of this run's GPUs, once it has some."""
        self.learners: dict[LearnerRole, ActorGroup[Any]] = {}
        """Process groups of ranks by the model that they are for; those of the policy are the trainers."""
        self.engines: ActorGroup[Engine] | None = None
        self._engines_shape: EngineShape | None = None
        """None while the engines have no model yet."""
        self._connecting = threading.Lock()
        self._device: Device | None = None
        self._reserved: list[Gpu] | None = None
        """This run's GPUs, once it has some."""

    def connect(self) -> Any:
        """Connect to Ray, or start it; returns the ``ray`` module.

        Call it first from the main thread, while no other thread runs: Ray forks, and a fork beside a thread that holds a lock
        (imports do) may hang.
        """
        with self._connecting:
            if self._device is None:
                self.ray = ray_cluster.connect(self.temporary)
                nodes = ray_cluster.gpus_by_node(self.ray)
                device = Device.detect(self.resources.device, sum(nodes), ray_cluster.is_private(), nodes)
                device.gpus_needed(self.resources)  # raises now if there are too few
                if not ray_cluster.is_private():
                    with self._shared.scratch() if self._shared else nullcontext() as folder:
                        check_nodes(self.ray, COMPARED, self.resources.wait_timeout_seconds, folder)
                self._device = device
                self.resources = self.resources.on(device.kind)
            return self.ray

    @property
    def device(self) -> Device:
        """The device of the actors."""
        self.connect()
        assert self._device is not None
        return self._device

    def on_device(self, resources: ResourcesConfig) -> ResourcesConfig:
        """A stage's resources with the defaults of the device."""
        return resources.on(self.device.kind)

    @property
    def gpus_needed(self) -> int:
        """GPUs of this run; 0 on a CPU."""
        return self.device.gpus_needed(self.resources)

    @property
    def engines_give_way(self) -> bool:
        """Whether engines free their GPUs' memory whenever they do not sample."""
        return self.device.engines_give_way(self.resources)

    @property
    def take_turns(self) -> bool:
        """Whether a stage's engines and another one's trainers must not work at once."""
        return self.device.take_turns(self.resources)

    def hardware(self, resources: ResourcesConfig | None = None) -> dict[str, Any]:
        """The hardware of a stage for provenance; with its ``resources`` if it used trainers or engines."""
        hardware: dict[str, Any] = {"machine": platform.machine(), "cpu": cpu_model()}
        hardware |= {"device": self.device.kind, "devices": self.device.count}
        if self.device.kind == "cuda":
            hardware["gpu"] = ", ".join(ray_cluster.gpu_models(self.ray))
        on_machine = self.trainers.on_machine[0] if self.trainers else None
        return hardware | (self.device.rounding(resources, on_machine) if resources else {})

    def reserve(self, waits: Callable[[str | None], None]) -> None:
        """Get this run's GPUs from Ray, if it has none yet. ``waits`` is that of a ticket."""
        if self.gpus is None:
            self.gpus = ray_cluster.reserve_gpus(self.ray, self.gpus_needed, waits)
            try:
                self._reserved = ray_cluster.reserved_gpus(self.ray, self.gpus)
                self._laid_out()  # raises now if there is no room for an engine
            except BaseException:
                self.end_actors()
                raise

    @property
    def layout(self) -> ActorLayout:
        """The places of all actors. Those without GPUs are on the nodes that live now: a group that starts again after the loss
        of a node starts on the others."""
        return self._laid_out()

    def _laid_out(self, reward_models: Sequence[str] = ()) -> ActorLayout:
        device = self.device
        assert (device.kind == "cpu") == (self._reserved is None)
        layout = place_models(self.resources, device.counts(self.resources), self._reserved, reward_models)
        if self._reserved is not None or ray_cluster.is_private():
            return layout
        return layout.over_nodes(ray_cluster.here_first(self.ray))

    # ---------------------------------------------------------------- groups

    @property
    def trainers(self) -> ActorGroup[Any] | None:
        """The running ranks of the policy."""
        return self.learners.get("policy")

    def ready_trainers(self) -> ActorGroup[Any]:
        """The ranks of the policy, in one process group; they also train all other stages."""
        return self.ready_learners("policy")

    def ready_learners(self, role: LearnerRole) -> ActorGroup[Any]:
        """The ranks of a model that has its own, in one process group."""
        if role in self.learners and _lost_a_node(self.learners[role]):
            self.learners.pop(role).kill()
        if role not in self.learners:
            self.learners[role] = self._start_learners(role)
        return self.learners[role]

    def ready_engines(self, request: EngineRequest) -> ActorGroup[Engine]:
        """Engines that can serve the request; those that start, start with the policy."""
        shape = shape_of(request, self.device)
        if self.engines is not None and _lost_a_node(self.engines):
            self.end_engines()
        if self._engines_shape and not self._engines_serve(shape):
            self.end_engines()
        if self.engines is None:
            self.engines = self._engine_actors()
        if self._engines_shape is None:
            arguments = {"request": request, "resources": self.resources, "device": self.device}
            try:
                self.engines.make(ENGINE, [arguments] * self.engines.size)
            except BaseException:
                self.end_engines()
                raise
            self._engines_shape = shape
        return self.engines

    def prepare_engines(self) -> None:
        """Start the engines' processes and their imports, without a model."""
        if self.engines is None:
            self.engines = self._engine_actors()
            self.engines.prepare(ENGINE_IMPORTS)

    @contextmanager
    def judges(self, name: str, names: Sequence[str], job: ForwardJob, resources: ResourcesConfig) -> Iterator[Judges]:
        """Actors of the reward model with this name, for as long as the caller needs them; hold trainers or engines while you
        do. ``names``: those of all reward models that the caller has at the same time."""
        places = self._laid_out(names).places[name]
        environment = self.device.trainer_environment(self.resources, len(places))
        group: ActorGroup[Forward] = self._group(name, places, [environment] * len(places))
        try:
            own = resources.of_model("reward", names.index(name))
            if is_sharded(own, group.size):
                self._join(group)
            shared = {"resources": own, "device": self.device, "world": group.size}
            group.make(job.open, [{"rank": rank, **shared} for rank in range(group.size)])
            yield Judges(group, own)
        finally:
            group.kill()

    def elsewhere(self, job: PoolJob) -> Nodes | None:
        """Pools of a user's function on the cluster's other nodes; None on one machine."""
        nodes = [] if ray_cluster.is_private() else ray_cluster.other_nodes(self.connect())
        if not nodes:
            return None
        group: ActorGroup[NodePool] = self._group("rewards", [Place(node=node) for node in nodes], [{}] * len(nodes))
        with _killed_on_failure(group):
            group.make(POOL, [{"job": job}] * group.size)
        return Nodes(group, group.timeout)

    def _start_learners(self, role: LearnerRole) -> ActorGroup[Any]:
        places = self.layout.places[role]
        environment = self.device.trainer_environment(self.resources, self.device.learners(self.resources))
        group = self._group("trainers" if role == "policy" else role, places, [environment] * len(places))
        group.prepare(TRAINER_IMPORTS)
        with _killed_on_failure(group):
            self._join(group)
        return group

    def _join(self, group: ActorGroup[Any]) -> None:
        """Make the actors of a group the ranks of a process group."""
        rendezvous = group.rendezvous(self.temporary)
        shared = {"world": group.size, "rendezvous": rendezvous, "resources": self.resources, "device": self.device}
        of_ranks = [{"rank": rank, "on_machine": count} for rank, count in enumerate(group.on_machine)]
        group.run(join, [{**of_rank, **shared} for of_rank in of_ranks])

    def _engine_actors(self) -> ActorGroup[Engine]:
        device, resources = self.device, self.resources
        places = self.layout.places["engines"]
        environments = [device.engine_environment(resources, place) for place in places]
        return self._group("engines", places, environments)

    def _engines_serve(self, shape: EngineShape) -> bool:
        """Whether the running engines have this shape, or room for longer sequences."""
        running = self._engines_shape
        assert running is not None
        return running.max_model_len >= shape.max_model_len and running[:-1] == shape[:-1]

    def _group(self, name: str, places: Sequence[Place], environments: list[dict[str, str]]) -> ActorGroup[Any]:
        return ActorGroup(self.ray, name, places, environments, self.resources.wait_timeout_seconds, self.gpus)

    # ---------------------------------------------------------------- the end

    def end_trainers(self) -> None:
        """End all ranks' processes; the next stage that needs trainers starts new ones."""
        for group in self.learners.values():
            group.kill()
        self.learners = {}

    def end_engines(self) -> None:
        """End the engines' processes; the next stage that needs engines starts new ones."""
        if self.engines is not None:
            self.engines.kill()
            self.engines = None
            self._engines_shape = None

    def end_actors(self) -> None:
        """End all actors, and give the GPUs back to Ray."""
        self.end_trainers()
        self.end_engines()
        if self.gpus is not None:
            self.ray.util.remove_placement_group(self.gpus)
            self.gpus = self._reserved = None

    def release_devices(self) -> None:
        """Leave the GPUs to another run, with all their memory. On a CPU, idle actors do not disturb other runs and stay."""
        if self._device is None or self._device.kind == "cpu":
            return
        processes = ray_cluster.actor_processes()
        self.end_actors()
        ray_cluster.wait_until_ended(processes)

    def close(self) -> None:
        """End all actors, and Ray if this process started it. May be called again."""
        if self.ray is not None:
            self.end_actors()
            self.ray.shutdown()
            self.ray = None
            self._device = self._reserved = None


def _lost_a_node(group: ActorGroup[Any]) -> bool:
    """Whether warm actors of a cluster died with their node while no stage used them. Replacing them does not count
    as a restart."""
    return not ray_cluster.is_private() and not group.is_whole()


@contextmanager
def _killed_on_failure(group: ActorGroup[Any]) -> Iterator[None]:
    """Kill a group that did not start as a whole: its ranks that did would wait for the others."""
    try:
        yield
    except BaseException:
        group.kill()
        raise
