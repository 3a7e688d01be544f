"""Which models of a run are on which GPUs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import GROUPS_OF_RANKS, ModelPlacement

LearnerRole = Literal["policy", "critic", "reference"]
LEARNERS: tuple[LearnerRole, ...] = get_args(LearnerRole)
"""Models whose processes are ranks of a process group: those that train, and the reference."""
TRAINER_GPU = 0.5
ENGINE_GPU = 0.45
"""Fractions of a GPU that actors claim from Ray: one rank and one engine fit together, two of a kind do not, and reward models
share what is left."""
PARTS = 10_000
"""Ray counts claims in ten-thousandths of a GPU."""


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
    """The places of all actors of a run. Names of groups are those of :func:`host_of`, ``engines``, and those of the reward
    models."""

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
    return sum(_ranks_apart(resources).values()) + sum(_rewards_apart(resources).values())


def gpus_needed(resources: ResourcesConfig, counts: Counts) -> int:
    """GPUs of a run: one per rank and ``tensor_parallel_size`` per engine, which may share those of the policy."""
    for_engines = counts.engines * counts.tensor_parallel_size
    shared = counts.trainers + for_engines if counts.engines_apart else max(counts.trainers, for_engines)
    return shared + gpus_apart(resources)


def place_models(
    resources: ResourcesConfig, counts: Counts, gpus: Sequence[Gpu] | None, reward_models: Sequence[str] = ("reward",)
) -> ActorLayout:
    """Place ranks, engines and ``reward_models`` on ``gpus``, of which there are :func:`gpus_needed`; None: on a CPU.

    All GPUs of an engine are on one node, unless it is larger than any node. So are ranks that compute micro-batches together,
    as long as there are nodes with room for a group of them; the last groups may cross nodes. Other ranks of one model are on
    neighbouring GPUs. The actors of reward models claim equal parts of what ranks and engines leave of their GPU, so that any
    number of them fits. Raises EnvironmentFault if the nodes have no room for an engine.
    """
    if gpus is None:
        sizes = {"policy": counts.trainers, **_ranks_apart(resources), "engines": counts.engines}
        sizes |= {name: judges_of(resources, number) for number, name in enumerate(reward_models)}
        return ActorLayout({name: (Place(),) * size for name, size in sizes.items()})
    free, size = sorted(gpus), counts.tensor_parallel_size
    together = max(getattr(resources, field) for field in GROUPS_OF_RANKS)
    engines, shared = _policy_and_engines(free, counts, together)
    if len(engines) < counts.engines:
        on_nodes = ", ".join(str(len(of_node)) for of_node in _by_node(sorted(gpus)))
        raise EnvironmentFault(
            f"resources.tensor_parallel_size: {counts.engines} engines of {size} GPUs each, which must be on one node, do not "
            f"fit on nodes with {on_nodes} GPUs; change resources.tensor_parallel_size or resources.engines"
        )
    ranks = {"policy": _reserve(list(shared), counts.trainers, together)}
    ranks |= {role: _reserve(free, count, together) for role, count in _ranks_apart(resources).items()}
    reward_gpus = {name: _reserve(free, count) for name, count in _rewards_apart(resources).items()}
    places = {role: tuple(Place((gpu.bundle,), TRAINER_GPU) for gpu in of_role) for role, of_role in ranks.items()}
    # An engine over several GPUs claims none itself: vLLM's workers claim them.
    share = ENGINE_GPU if size == 1 else 0.0
    places["engines"] = tuple(Place(tuple(gpu.bundle for gpu in chunk), share) for chunk in engines)
    left = dict.fromkeys(gpus, PARTS)
    for gpu in itertools.chain(*ranks.values()):
        left[gpu] -= round(TRAINER_GPU * PARTS)
    for gpu in itertools.chain(*engines):
        left[gpu] -= round(ENGINE_GPU * PARTS)
    return ActorLayout(places | _reward_places(resources, reward_models, {**ranks, **reward_gpus}, shared, left))


def _policy_and_engines(free: list[Gpu], counts: Counts, together: int) -> tuple[list[list[Gpu]], list[Gpu]]:
    """Remove GPUs for the policy and the engines from ``free`` and return them: those of each engine, and those of the policy's
    ranks, in groups of ``together``."""
    size = counts.tensor_parallel_size
    if counts.engines_apart:  # on the last GPUs
        engines = sorted(sorted(chunk) for chunk in _of_engines(free[::-1], size, together)[: counts.engines])
        _remove(free, itertools.chain(*engines))
        return engines, sorted(_reserve(free, counts.trainers, together))
    # Larger groups first, because smaller ones fit into what they leave. Engines must fit, ranks need not.
    ranks, for_engines = (counts.trainers, together), (counts.engines * size, size)
    (count, larger), (least, smaller) = (ranks, for_engines) if together % size == 0 else (for_engines, ranks)
    shared = _reserve(free, count, larger, smaller)
    shared = sorted(shared + _reserve(free, max(0, least - count), smaller, beside=larger))
    return _of_engines(shared, size)[: counts.engines], shared


def _of_engines(gpus: Sequence[Gpu], size: int, larger: int = 1) -> list[list[Gpu]]:
    """As :func:`_on_one_node`, but across nodes if an engine is larger than any."""
    if size > max(map(len, _by_node(gpus)), default=0):
        return [list(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
    return _on_one_node(gpus, size, larger)


def _reserve(free: list[Gpu], count: int, *sizes: int, beside: int = 1) -> list[Gpu]:
    """Remove so many GPUs from ``free`` and return them: as many groups of the first of ``sizes`` as there are, each on one
    node, then of the next one, and then any. Groups of the size ``beside`` stay whole, as far as possible."""
    taken: list[Gpu] = []
    for larger, size in itertools.pairwise((beside, *sizes, 1)):
        groups = _on_one_node(free, size, larger)[: (count - len(taken)) // size]
        taken += itertools.chain(*groups)
        _remove(free, taken)
    return taken


def _on_one_node(gpus: Sequence[Gpu], size: int, larger: int = 1) -> list[list[Gpu]]:
    """As many groups of so many GPUs as there are, each on one node; first those that break no group of the size ``larger``,
    because their node has more GPUs than such groups take."""
    harmless, others = list[list[Gpu]](), list[list[Gpu]]()
    for of_node in _by_node(gpus):
        in_larger = len(of_node) // larger * larger
        for first in range(0, len(of_node) - size + 1, size):
            (harmless if first >= in_larger else others).append(of_node[first : first + size])
    return harmless + others


def _by_node(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Sorted GPUs by their node."""
    return [list(of_node) for _, of_node in itertools.groupby(gpus, lambda gpu: gpu.node)]


def _remove(free: list[Gpu], taken: Iterable[Gpu]) -> None:
    """Remove these GPUs from ``free``."""
    gone = set(taken)
    free[:] = [gpu for gpu in free if gpu not in gone]


def _ranks_apart(resources: ResourcesConfig) -> dict[str, int]:
    """The ranks of models beside the policy that have GPUs of their own."""
    sizes = {"critic": resources.models.critic.gpus, "reference": resources.models.reference.gpus}
    return {role: size for role, size in sizes.items() if size}


def _rewards_apart(resources: ResourcesConfig) -> dict[str, int]:
    """The numbers of GPUs that reward models have of their own; see :func:`host_of_reward`."""
    sizes = {"reward": resources.models.reward.gpus}
    sizes |= {f"reward_models.{number}": place.gpus for number, place in enumerate(resources.models.reward_models)}
    return {name: size for name, size in sizes.items() if size}


def judges_of(resources: ResourcesConfig, number: int) -> int:
    """Actors of the reward model with this number."""
    return resources.judges or resources.models.of_reward(number).gpus or 1


def host_of_reward(resources: ResourcesConfig, number: int) -> str | None:
    """Whose GPUs the reward model with this number is on: those of a model or, by its field of ``resources.models``, its own;
    None if the recipe does not say."""
    place = resources.models.of_reward(number)
    if place.gpus:
        return f"reward_models.{number}" if number < len(resources.models.reward_models) else "reward"
    return place.colocate_with


def _reward_places(
    resources: ResourcesConfig,
    names: Sequence[str],
    groups: Mapping[str, Sequence[Gpu]],
    shared: Sequence[Gpu],
    left: Mapping[Gpu, int],
) -> dict[str, tuple[Place, ...]]:
    """The places of the actors of each reward model: in turn on its own GPUs, those of another model, or ``shared``. All on a
    GPU claim equal parts of what is ``left`` of it, in ``PARTS``."""
    of_host = {host: tuple(sorted(gpus)) for host, gpus in [*groups.items(), (None, shared)]}
    in_turn = {gpus: itertools.cycle(gpus) for gpus in of_host.values()}
    gpus = {
        name: [next(in_turn[of_host[host_of_reward(resources, number)]]) for _ in range(judges_of(resources, number))]
        for number, name in enumerate(names)
    }
    actors = Counter(itertools.chain(*gpus.values()))
    shares = {gpu: left[gpu] // number / PARTS for gpu, number in actors.items()}
    return {name: tuple(Place((gpu.bundle,), shares[gpu]) for gpu in of_model) for name, of_model in gpus.items()}
