"""Models on GPUs, as a recipe places them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from pydantic import ValidationError

from alignment_core.cluster.device import Device, compute_together
from alignment_core.cluster.layout import ENGINE_GPU, ActorLayout, Gpu, Place, gpus_needed, groups_of, place_models
from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import ResourcesConfig


def gpus_of(sizes: Sequence[int]) -> list[Gpu]:
    """GPUs of nodes with so many each; Ray numbers its bundles without regard to nodes, here in turn."""
    places = sorted((number, f"node-{node}") for node, size in enumerate(sizes) for number in range(size))
    return [Gpu(node, bundle) for bundle, (_, node) in enumerate(places)]


def placed(sizes: Sequence[int], **wanted: Any) -> tuple[ActorLayout, dict[int, str]]:
    """A layout, and the node of each bundle."""
    resources = ResourcesConfig(**wanted)
    device = Device("cuda", sum(sizes))
    assert device.gpus_needed(resources) <= device.count
    gpus = gpus_of(sizes)
    return place_models(resources, device.counts(resources), gpus), {gpu.bundle: gpu.node for gpu in gpus}


def nodes(layout: ActorLayout, node_of: dict[int, str], role: str) -> list[set[str]]:
    return [{node_of[bundle] for bundle in place.bundles} for place in layout.places[role]]


def bundles(layout: ActorLayout, role: str) -> list[int]:
    return [bundle for place in layout.places[role] for bundle in place.bundles]


def test_by_default_all_models_are_with_the_policy_and_each_rank_beside_an_engine() -> None:
    layout, _ = placed([4])
    assert set(layout.places) == {"policy", "engines", "reward"}
    assert [place.bundles for place in layout.places["policy"]] == [(0,), (1,), (2,), (3,)]
    assert [place.bundles for place in layout.places["engines"]] == [(0,), (1,), (2,), (3,)]
    assert [place.bundles for place in layout.places["reward"]] == [(0,)]
    assert groups_of(ResourcesConfig()) == {"policy": ["policy", "critic", "reference"]}


def test_the_layout_of_7b_of_the_paper() -> None:
    """OpenRLHF's paper, table 3: 7B on 16 GPUs with 4 for the actor, 4 for the critic, 2 for the reference, 2 for the reward
    model and 4 engines."""
    models = {"critic": {"gpus": 4}, "reference": {"gpus": 2}, "reward": {"gpus": 2}}
    layout, node_of = placed([8, 8], trainers=4, engines=4, placement="disaggregated", models=models)
    roles = ("policy", "critic", "reference", "reward", "engines")
    assert [len(layout.places[role]) for role in roles] == [4, 4, 2, 2, 4]
    every = [bundle for role in roles for bundle in bundles(layout, role)]
    assert sorted(every) == list(range(16))
    for role in ("policy", "critic", "engines"):
        assert len(set.union(*nodes(layout, node_of, role))) == 1, role


def test_engines_over_four_gpus_share_those_of_a_policy_of_70b() -> None:
    """Four engines of tensor parallelism 4 share 16 GPUs with the actor; critic, reference and reward model have 16 each."""
    models = {"critic": {"gpus": 16}, "reference": {"gpus": 16}, "reward": {"colocate_with": "reference"}}
    layout, node_of = placed([8] * 6, trainers=16, engines=4, tensor_parallel_size=4, models=models)
    assert [len(of) for of in nodes(layout, node_of, "engines")] == [1, 1, 1, 1]
    assert sorted(bundles(layout, "engines")) == sorted(bundles(layout, "policy"))
    assert not {*bundles(layout, "policy")} & {*bundles(layout, "critic"), *bundles(layout, "reference")}
    assert {*bundles(layout, "reward")} <= {*bundles(layout, "reference")}


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_no_engine_crosses_nodes_however_ray_numbers_its_bundles(placement: str) -> None:
    trainers = 8 if placement == "colocated" else 4
    layout, node_of = placed([4, 4, 4], trainers=trainers, engines=2, tensor_parallel_size=4, placement=placement)
    assert [len(of) for of in nodes(layout, node_of, "engines")] == [1, 1]


def test_an_engine_that_is_larger_than_any_node_crosses_nodes() -> None:
    layout, node_of = placed([2, 2], trainers=4, tensor_parallel_size=4)
    assert [len(of) for of in nodes(layout, node_of, "engines")] == [2]


def test_engines_that_fit_on_no_node_are_refused() -> None:
    with pytest.raises(
        EnvironmentFault,
        match=r"resources\.tensor_parallel_size: 3 engines of 2 GPUs each, .* do not fit on nodes with 3, 3 GPUs; change",
    ):
        placed([3, 3], trainers=6, engines=3, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("sizes", "wanted", "engines"),
    [
        ([3, 3], {}, 2),
        ([3, 3], {"trainers": 2, "placement": "disaggregated"}, 2),
        ([3, 3], {"models": {"critic": {"gpus": 2}}}, 2),
        ([3, 3, 3], {"models": {"reward": {"gpus": 2}}}, 3),
        ([1, 1, 1], {}, 1),
        ([8], {}, 4),
    ],
)
def test_by_default_there_are_as_many_engines_as_nodes_have_room_for(
    sizes: list[int], wanted: dict[str, Any], engines: int
) -> None:
    """Of two GPUs each: nodes with three have room for one, and an engine that is larger than any node crosses them."""
    resources = ResourcesConfig(tensor_parallel_size=2, **wanted)
    device = Device("cuda", sum(sizes), nodes=tuple(sizes))
    assert device.engines(resources) == engines
    assert device.gpus_needed(resources) == sum(sizes)
    assert len(place_models(resources, device.counts(resources), gpus_of(sizes)).places["engines"]) == engines


def test_too_many_models_are_refused_with_the_fields_to_lower() -> None:
    resources = ResourcesConfig(trainers=4, models={"critic": {"gpus": 4}, "reward": {"gpus": 1}})
    with pytest.raises(
        EnvironmentFault, match=r"and 5 of resources\.models, need 9 GPUs, and there are 8; lower .*models"
    ):
        Device("cuda", 8).gpus_needed(resources)


@pytest.mark.parametrize(
    ("wanted", "trainers", "engines"),
    [
        ({"models": {"critic": {"gpus": 2}}}, 6, 6),
        ({"models": {"critic": {"gpus": 2}}, "placement": "disaggregated"}, 3, 3),
        ({"models": {"reward": {"gpus": 2}}, "placement": "disaggregated", "trainers": 4}, 4, 2),
    ],
)
def test_other_gpus_are_for_policy_and_engines(wanted: dict[str, Any], trainers: int, engines: int) -> None:
    counts = Device("cuda", 8).counts(ResourcesConfig(**wanted))
    assert (counts.trainers, counts.engines) == (trainers, engines)


def with_rewards(
    sizes: Sequence[int], reward_models: int, **wanted: Any
) -> tuple[ActorLayout, list[tuple[Place, ...]]]:
    """A layout, and the places of each of so many reward models."""
    resources = ResourcesConfig(**wanted)
    device, names = Device("cuda", sum(sizes)), [f"reward-{number}" for number in range(reward_models)]
    layout = place_models(resources, device.counts(resources), gpus_of(sizes), names)
    return layout, [layout.places[name] for name in names]


def claims(layout: ActorLayout, tensor_parallel: int = 1) -> Counter[int]:
    """Ten-thousandths of each GPU that its actors claim from Ray, with those of an engine's workers."""
    parts: Counter[int] = Counter()
    for name, places in layout.places.items():
        for place in places:
            is_spread = name == "engines" and tensor_parallel > 1
            share = ENGINE_GPU if is_spread else place.gpu_share
            for bundle in place.bundles if is_spread else place.bundles[:1]:
                parts[bundle] += round(share * 10_000)
    return parts


@pytest.mark.parametrize(
    ("sizes", "reward_models", "wanted", "shares"),
    [
        # 1 - 0.5 of a trainer - 0.45 of an engine, divided by six
        ([1], 6, {}, [[0.0083]] * 6),
        ([1], 1, {"judges": 6}, [[0.0083] * 6]),
        ([1], 1, {}, [[0.05]]),
        ([4], 3, {}, [[0.05]] * 3),
        ([2], 1, {"trainers": 1, "judges": 6, "models": {"reward": {"gpus": 1}}}, [[0.1666] * 6]),
        (
            [2],
            2,
            {"trainers": 1, "models": {"critic": {"gpus": 1}, "reward": {"colocate_with": "critic"}}},
            [[0.25]] * 2,
        ),
        ([2], 2, {"placement": "disaggregated", "trainers": 1}, [[0.25]] * 2),
        ([2], 3, {"trainers": 2, "tensor_parallel_size": 2, "judges": 2}, [[0.0166, 0.0166]] * 3),
    ],
)
def test_reward_models_claim_equal_parts_of_what_is_left_of_their_gpu(
    sizes: list[int], reward_models: int, wanted: dict[str, Any], shares: list[list[float]]
) -> None:
    """Ray starts no actor whose claim is not left. At a fixed claim each, six were more than one GPU had."""
    layout, places = with_rewards(sizes, reward_models, **wanted)
    assert [[place.gpu_share for place in of_model] for of_model in places] == shares
    assert max(claims(layout, wanted.get("tensor_parallel_size", 1)).values()) <= 10_000


def test_the_actors_of_several_reward_models_are_on_gpus_in_turn() -> None:
    _, places = with_rewards([4], 3)
    assert [[place.bundles for place in of_model] for of_model in places] == [[(0,)], [(1,)], [(2,)]]
    _, places = with_rewards([4], 2, judges=3)
    assert [[place.bundles for place in of_model] for of_model in places] == [[(0,), (1,), (2,)], [(3,), (0,), (1,)]]
    _, places = with_rewards([4], 2, trainers=4, models={"reward_models": [{"colocate_with": "policy"}]})
    assert [[place.bundles for place in of_model] for of_model in places] == [[(0,)], [(1,)]]


def test_reward_models_are_not_on_the_gpus_of_other_models_unless_the_recipe_says_so() -> None:
    _, places = with_rewards([4], 1, trainers=2, judges=4, models={"critic": {"gpus": 2}})
    assert [place.bundles for place in places[0]] == [(0,), (1,), (0,), (1,)]


def test_reward_models_of_their_own_have_an_actor_on_each_gpu() -> None:
    layout, _ = placed([6], trainers=4, models={"reward": {"gpus": 2}})
    assert [place.bundles for place in layout.places["reward"]] == [(4,), (5,)]
    beside, _ = placed([6], trainers=4, judges=3, models={"critic": {"gpus": 2}, "reward": {"colocate_with": "critic"}})
    assert [place.bundles for place in beside.places["reward"]] == [(4,), (5,), (4,)]


def test_each_reward_model_can_have_a_place_of_its_own() -> None:
    """Two GPUs for the first, those of the critic for the second, and one for all others."""
    models = {
        "critic": {"gpus": 1},
        "reward": {"gpus": 1},
        "reward_models": [{"gpus": 2, "zero_stage": 3}, {"colocate_with": "critic"}],
    }
    layout, places = with_rewards([6], 4, trainers=2, models=models)
    assert bundles(layout, "policy") == [0, 1]
    assert bundles(layout, "critic") == [2]
    assert [[place.bundles for place in of_model] for of_model in places] == [[(4,), (5,)], [(2,)], [(3,)], [(3,)]]
    assert [places[number][0].gpu_share for number in range(4)] == [1.0, 0.5, 0.5, 0.5]
    resources = ResourcesConfig(models=models)
    assert [resources.of_model("reward", number).zero_stage for number in range(3)] == [3, None, None]
    assert Device("cuda", 6).gpus_needed(resources) == 6


def test_on_a_cpu_models_have_processes_of_their_own() -> None:
    resources = ResourcesConfig(trainers=2, models={"critic": {"gpus": 1}, "reward": {"gpus": 2}})
    layout = place_models(resources, Device("cpu", 4).counts(resources), None)
    assert {name: len(places) for name, places in layout.places.items()} == {
        "policy": 2,
        "critic": 1,
        "reward": 2,
        "engines": 2,
    }
    over = layout.over_nodes(["a", "b"])
    assert over.places["policy"] == (Place(node="a"), Place(node="b"))


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ({"critic": {"gpus": 2, "colocate_with": "reference"}}, "`gpus` are of its own, and `colocate_with` names"),
        ({"critic": {"colocate_with": "reference"}}, r"`critic\.colocate_with: reference` needs `reference\.gpus`"),
        ({"critic": {"colocate_with": "critic"}}, r"`critic\.colocate_with: critic` needs `critic\.gpus`"),
        ({"reference": {"offload_parameters": True}}, "`offload_parameters` needs `zero_stage: 3`"),
        (
            {"reward_models": [{}, {"colocate_with": "critic"}]},
            r"`reward_models\.1\.colocate_with: critic` needs `critic\.gpus`",
        ),
        ({"critic": {"gpus": 0}}, "greater than or equal to 1"),
        ({"teacher": {"gpus": 1}}, "teacher"),
    ],
)
def test_places_that_cannot_be_are_refused(models: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ResourcesConfig(models=models)


def test_each_model_has_its_own_stage_and_offloading() -> None:
    models = {
        "critic": {"zero_stage": 3, "offload_optimizer": True},
        "reference": {"zero_stage": 3, "offload_parameters": True},
    }
    resources = ResourcesConfig(zero_stage=2, models=models)
    critic, reference, reward = (resources.of_model(role) for role in ("critic", "reference", "reward"))  # type: ignore[arg-type]
    assert (critic.zero_stage, critic.offload_optimizer) == (3, True)
    assert reference.deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu"}
    assert (reference.zero_stage, resources.zero_stage, reward.zero_stage) == (3, 2, None)


def crossing(layout: ActorLayout, node_of: dict[int, str], together: int) -> int:
    """Groups of ranks that are on several nodes."""
    on_nodes = [
        {node_of[bundle] for bundle in of_role[first : first + together]}
        for of_role in (bundles(layout, role) for role in ("policy", "critic", "reference") if role in layout.places)
        for first in range(0, len(of_role), together)
    ]
    return sum(len(of_group) > 1 for of_group in on_nodes)


def most_groups(sizes: Sequence[int], size: int, others: int, of_others: int) -> int:
    """How many groups of a size fit on nodes beside so many of another size, by trying all numbers of these on each node."""
    most = {0: 0}
    for of_node in sizes:
        numbers = [(taken, (of_node - taken * of_others) // size) for taken in range(of_node // of_others + 1)]
        pairs = [(before + taken, groups + more) for before, groups in most.items() for taken, more in numbers]
        most = {taken: max(groups for of, groups in pairs if of == taken) for taken, _ in pairs}
    return most.get(others, 0)


@pytest.mark.parametrize(
    ("sizes", "crosses", "wanted"),
    [
        ([3, 5], 1, {"trainers": 8}),
        ([3, 4, 1], 1, {"trainers": 8}),
        ([3, 3], 0, {"trainers": 4}),
        ([3, 3], 0, {"trainers": 2, "engines": 4, "models": {"critic": {"gpus": 2}}}),
        ([5, 3, 4], 1, {"trainers": 4, "models": {"critic": {"gpus": 4}, "reference": {"gpus": 4}}}),
        ([3, 3, 2], 0, {"trainers": 2, "engines": 2, "placement": "disaggregated", "models": {"critic": {"gpus": 4}}}),
        ([1] * 4, 2, {"trainers": 4}),
    ],
)
@pytest.mark.parametrize("field", ["sequence_parallel_size", "trainer_tensor_parallel_size"])
def test_groups_of_ranks_cross_nodes_only_where_none_has_room(
    sizes: list[int], crosses: int, wanted: dict[str, Any], field: str
) -> None:
    """In groups of two. Taken in order, ranks 2 and 3 of nodes with three and four GPUs crossed, and so did 6 and 7."""
    layout, node_of = placed(sizes, **{field: 2}, **wanted)
    assert crossing(layout, node_of, 2) == crosses


def test_a_group_of_ranks_that_is_larger_than_any_node_is_on_neighbouring_gpus() -> None:
    layout, node_of = placed([4, 4, 4], trainers=8, sequence_parallel_size=8, models={"reward": {"gpus": 4}})
    assert set.union(*nodes(layout, node_of, "policy")) == {"node-0", "node-1"}


@given(
    sizes=some.lists(some.integers(1, 8), min_size=1, max_size=5),
    tensor_parallel=some.sampled_from([1, 2, 4]),
    together=some.sampled_from([1, 2, 4]),
    apart=some.booleans(),
    others=some.tuples(some.integers(0, 3), some.integers(0, 3), some.integers(0, 2)),
    trainers=some.integers(1, 6),
    engines=some.integers(1, 4),
    judges=some.none() | some.integers(1, 7),
    reward_models=some.integers(0, 4),
    single=some.lists(some.integers(0, 2), max_size=2),
)
@settings(max_examples=300)
def test_models_have_the_gpus_that_the_recipe_gives_them(
    sizes: list[int],
    tensor_parallel: int,
    together: int,
    apart: bool,
    others: tuple[int, int, int],
    trainers: int,
    engines: int,
    judges: int | None,
    reward_models: int,
    single: list[int],
) -> None:
    groups = dict(zip(("critic", "reference", "reward"), others, strict=True))
    models: dict[str, Any] = {
        role: {"gpus": size * (1 if role == "reward" else together)} for role, size in groups.items() if size
    }
    models["reward_models"] = [{"gpus": size} if size else {} for size in single]
    trainers *= together
    resources = ResourcesConfig(
        trainers=trainers,
        engines=engines,
        tensor_parallel_size=tensor_parallel,
        sequence_parallel_size=together,
        judges=judges,
        placement="disaggregated" if apart else "colocated",
        models=models,
    )
    counts = Device("cuda", sum(sizes)).counts(resources)
    if gpus_needed(resources, counts) > sum(sizes):
        return
    gpus = gpus_of(sizes)
    node_of = {gpu.bundle: gpu.node for gpu in gpus}
    rewards = [f"reward-{number}" for number in range(reward_models)]
    fitting = sum(size // tensor_parallel for size in sizes)
    try:
        layout = place_models(resources, counts, gpus, rewards)
    except EnvironmentFault:
        assert fitting < engines
        assert tensor_parallel <= max(sizes)
        return
    of_models = [bundles(layout, role) for role in ("policy", "critic", "reference") if role in layout.places]
    for own in (*of_models, bundles(layout, "engines")):
        assert len(set(own)) == len(own)
    every = [bundle for own in of_models for bundle in own]
    assert len(set(every)) == len(every), "models beside the policy have GPUs of their own"
    if apart:
        assert not {*every} & {*bundles(layout, "engines")}
    for name, own_gpus in zip(rewards, [*single, *[others[2]] * reward_models], strict=False):
        of_model = bundles(layout, name)
        assert len(of_model) == (judges or own_gpus or 1)
        assert not own_gpus or not {*every, *bundles(layout, "engines")} & {*of_model}
    assert all(place.gpu_share > 0 for name in rewards for place in layout.places[name]), "or Ray gives them no GPU"
    assert max(claims(layout, tensor_parallel).values()) <= 10_000
    assert len(bundles(layout, "policy")) == trainers
    if tensor_parallel > max(sizes):
        return
    assert all(len(of_engine) == 1 for of_engine in nodes(layout, node_of, "engines"))
    of_engines, size = engines, tensor_parallel
    if not apart:  # those beyond the policy's GPUs
        size = min(tensor_parallel, together)
        of_engines = max(0, engines * tensor_parallel - trainers) // size
    ranks = trainers // together + others[0] + others[1]
    fewest = max(0, ranks - most_groups(sizes, together, of_engines, size))
    assert crossing(layout, node_of, together) <= fewest, "no group crosses nodes while one has room for it"


def test_ranks_that_compute_together_are_neighbours_and_divide_the_trainers() -> None:
    layout, node_of = placed([2, 4, 2], trainers=8, sequence_parallel_size=2)
    bundles = [place.bundles[0] for place in layout.places["policy"]]
    assert all(node_of[first] == node_of[second] for first, second in zip(bundles[::2], bundles[1::2], strict=True))
    assert Device("cpu", 4).trainers(ResourcesConfig(sequence_parallel_size=4)) == 4, "by default one group"
    says = (
        r"sequence_parallel_size: 4 does not divide the 6 trainers that 6 GPUs have by default; set resources\.trainers"
    )
    with pytest.raises(EnvironmentFault, match=says):
        Device("cuda", 6).gpus_needed(ResourcesConfig(sequence_parallel_size=4))
    resources = ResourcesConfig(sequence_parallel_size=2, models={"critic": {"gpus": 2}})
    assert [resources.of_model(role).sequence_parallel_size for role in ("critic", "reference", "reward")] == [2, 2, 1]
    assert Device("cpu", 4).rounding(resources)["sequence_parallel_size"] == 2
    assert "sequence_parallel_size" not in Device("cpu", 4).rounding(ResourcesConfig())


def test_ranks_that_share_layers_are_neighbours_on_a_node() -> None:
    layout, node_of = placed([2, 4, 2], trainers=8, trainer_tensor_parallel_size=2)
    bundles = [place.bundles[0] for place in layout.places["policy"]]
    assert all(node_of[first] == node_of[second] for first, second in zip(bundles[::2], bundles[1::2], strict=True))
    assert Device("cpu", 4).trainers(ResourcesConfig(trainer_tensor_parallel_size=4)) == 4, "by default one group"
    says = r"trainer_tensor_parallel_size: 4 does not divide the 6 trainers that 6 GPUs have by default"
    with pytest.raises(EnvironmentFault, match=says):
        Device("cuda", 6).gpus_needed(ResourcesConfig(trainer_tensor_parallel_size=4))
    resources = ResourcesConfig(trainer_tensor_parallel_size=2)
    sizes = [resources.of_model(role).trainer_tensor_parallel_size for role in ("critic", "reference", "reward")]
    assert sizes == [2, 2, 1]
    assert compute_together(resources, 2)
    assert Device("cpu", 4).rounding(resources)["trainer_tensor_parallel_size"] == 2
