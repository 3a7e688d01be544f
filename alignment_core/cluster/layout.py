"""Which models of a run are on which GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import ModelPlacement

LearnerRole = Literal["policy", "critic", "reference"]
LEARNERS: tuple[LearnerRole, ...] = get_args(LearnerRole)
"""Models whose processes are ranks of a process group: those that train, and the reference."""
TRAINER_GPU = 0.5
ENGINE_GPU = 0.45
JUDGE_GPU = 0.01
"""Fractions of a GPU that actors claim from Ray: one rank and one engine fit together, two of a kind do not, and reward models
fit beside them."""
APART_JUDGE_GPU = 0.2
"""Fraction that a reward model claims of a GPU on which there are only reward models."""


@dataclass(frozen=True)
class Place:
    """The place of an actor: bundles of the placement group (one GPU each; none on a CPU), and its fraction of the first."""

    bundles: tuple[int, ...] = ()
    gpu_share: float = 0.0
    node: str | None = None
    """Ray's id of a node of a cluster, for actors without a GPU."""


class Gpu(NamedTuple):
    """A GPU that Ray reserved."""

    node: str
    bundle: int
    """Its index in the placement group."""


@dataclass(frozen=True)
class Counts:
    """How many ranks and GPUs a recipe asks for, with the defaults of the device."""

    trainers: int
    engines: int
    tensor_parallel_size: int
    engines_apart: bool
    """Whether engines have GPUs of their own."""


@dataclass(frozen=True)
class ActorLayout:
    """The places of all actors of a run. Names of groups are those of :func:`host_of`, ``engines`` and ``reward``."""

    places: Mapping[str, tuple[Place, ...]]

    def over_nodes(self, nodes: Sequence[str]) -> ActorLayout:
        """The same, of actors without GPUs, over nodes of a cluster in turn."""
        return ActorLayout(
            {
                name: tuple(replace(place, node=nodes[index % len(nodes)]) for index, place in enumerate(places))
                for name, places in self.places.items()
            }
        )


def host_of(resources: ResourcesConfig, role: LearnerRole) -> LearnerRole:
    """The model whose ranks also hold this one; itself if it has ranks of its own."""
    if role == "policy":
        return role
    place: ModelPlacement = getattr(resources.models, role)
    return role if place.gpus else (place.colocate_with or "policy")


def groups_of(
    resources: ResourcesConfig, roles: Sequence[LearnerRole] = LEARNERS
) -> dict[LearnerRole, list[LearnerRole]]:
    """These roles by the one whose ranks hold them."""
    groups: dict[LearnerRole, list[LearnerRole]] = {}
    for role in roles:
        groups.setdefault(host_of(resources, role), []).append(role)
    return groups


def gpus_apart(resources: ResourcesConfig) -> int:
    """GPUs of critic, reference and reward models that have their own."""
    return sum(size for _, size in _apart(resources))


def gpus_needed(resources: ResourcesConfig, counts: Counts) -> int:
    """GPUs of a run: one per rank and ``tensor_parallel_size`` per engine, which may share those of the policy."""
    for_engines = counts.engines * counts.tensor_parallel_size
    shared = counts.trainers + for_engines if counts.engines_apart else max(counts.trainers, for_engines)
    return shared + gpus_apart(resources)


def place_models(resources: ResourcesConfig, counts: Counts, gpus: Sequence[Gpu] | None) -> ActorLayout:
    """Place ranks, engines and reward models on ``gpus``, of which there are :func:`gpus_needed`; None: on a CPU.

    The ranks of one model are on neighbouring GPUs, and all GPUs of an engine on one node, unless it is larger than any node.
    Raises EnvironmentFault if the nodes have no room for an engine.
    """
    if gpus is None:
        sizes = {"policy": counts.trainers, **dict(_apart(resources)), "engines": counts.engines}
        sizes["reward"] = resources.judges or sizes.get("reward", 1)
        return ActorLayout({name: (Place(),) * size for name, size in sizes.items()})
    ordered = sorted(gpus)
    size = counts.tensor_parallel_size
    of_apart = gpus_apart(resources)
    for_engines = ordered if counts.engines_apart else ordered[: len(ordered) - of_apart]
    chunks = _on_one_node(for_engines, size)
    if len(chunks) < counts.engines:
        on_nodes = ", ".join(str(len(list(of_node))) for _, of_node in groupby(for_engines, lambda gpu: gpu.node))
        raise EnvironmentFault(
            f"resources.tensor_parallel_size: {counts.engines} engines of {size} GPUs each, which must be on one node, do not "
            f"fit on nodes with {on_nodes} GPUs; change resources.tensor_parallel_size or resources.engines"
        )
    engines = chunks[-counts.engines :] if counts.engines_apart else chunks[: counts.engines]
    taken = {gpu for chunk in engines for gpu in chunk} if counts.engines_apart else set()
    left = [gpu for gpu in ordered if gpu not in taken]
    own = {"policy": left[: counts.trainers]}
    after = len(left) - of_apart
    for role, count in _apart(resources):
        own[role] = left[after : after + count]
        after += count
    places = {name: tuple(Place((gpu.bundle,), TRAINER_GPU) for gpu in of_role) for name, of_role in own.items()}
    # An engine over several GPUs claims none itself: vLLM's workers claim them.
    share = ENGINE_GPU if size == 1 else 0.0
    places["engines"] = tuple(Place(tuple(gpu.bundle for gpu in chunk), share) for chunk in engines)
    # Engines with GPUs of their own leave no room on them.
    places["reward"] = _of_reward(resources, own, own["policy"] if counts.engines_apart else ordered)
    return ActorLayout(places)


def _apart(resources: ResourcesConfig) -> list[tuple[str, int]]:
    models = resources.models
    sizes = {"critic": models.critic.gpus, "reference": models.reference.gpus, "reward": models.reward.gpus}
    return [(name, size) for name, size in sizes.items() if size]


def _on_one_node(gpus: Sequence[Gpu], size: int) -> list[Sequence[Gpu]]:
    """As many groups of so many GPUs as there are, each on one node; across nodes if it is larger than any."""
    by_node = [list(of_node) for _, of_node in groupby(gpus, lambda gpu: gpu.node)]
    if size > max(map(len, by_node)):
        by_node = [list(gpus)]
    return [of_node[first : first + size] for of_node in by_node for first in range(0, len(of_node) - size + 1, size)]


def _of_reward(resources: ResourcesConfig, own: Mapping[str, Sequence[Gpu]], gpus: Sequence[Gpu]) -> tuple[Place, ...]:
    """The places of the actors of a reward model, on its own GPUs, on those of another model, or on ``gpus``."""
    place = resources.models.reward
    if place.gpus:
        judges = resources.judges or place.gpus
        return tuple(Place((own["reward"][n % place.gpus].bundle,), APART_JUDGE_GPU) for n in range(judges))
    beside = own[place.colocate_with] if place.colocate_with else gpus
    return tuple(Place((beside[n % len(beside)].bundle,), JUDGE_GPU) for n in range(resources.judges or 1))
