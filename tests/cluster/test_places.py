"""Trainers and engines share GPUs one to one. Ray's own scheduler places them; the GPUs are only numbers, without a driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest

from alignment_core.cluster import device as devices
from alignment_core.cluster.device import Device, recomputed_activations
from alignment_core.cluster.layout import Gpu, Place, place_models
from alignment_core.errors import EnvironmentFault
from alignment_core.recipes import ResourcesConfig

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device, recomputed_activations
from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.layout import place_models
from alignment_core.recipes import ResourcesConfig
from tests.cluster.visible import Visible

ray_cluster.prepare_environment()
import ray
ray.init(num_gpus=4, num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[1], _node_ip_address="127.0.0.1",
         object_store_memory=100 << 20)
environments = {}
for case, wanted in json.loads(sys.argv[2]).items():
    device, resources = Device("cuda", ray_cluster.gpus(ray)), ResourcesConfig(**wanted)
    gpus, groups = ray_cluster.reserve_gpus(ray, device.gpus_needed(resources)), []
    layout = place_models(resources, device.counts(resources), ray_cluster.reserved_gpus(ray, gpus))
    environments[case] = {}
    for role, places in layout.places.items():
        groups.append(ActorGroup(ray, role, places, [{"WHO": f"{role} {n}"} for n in range(len(places))], 60, gpus))
        groups[-1].make("tests.cluster.visible:Visible", [{}] * len(places))
        environments[case][role] = groups[-1].all(Visible.look)
    for group in groups:
        group.kill()
    ray.util.remove_placement_group(gpus)
print(json.dumps(environments))
ray.shutdown()
"""
NODES = """
import json, sys
from pathlib import Path
from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device
from alignment_core.cluster.layout import place_models
from alignment_core.recipes import ResourcesConfig

ray_cluster.prepare_environment()
import ray
from ray.cluster_utils import Cluster

Path(sys.argv[1], "ray").mkdir()
plain = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args={**plain, "num_gpus": 0, "include_dashboard": False})
for _ in range(3):
    cluster.add_node(**plain, num_gpus=4)
ray.init(address=cluster.address, logging_level="ERROR")
cluster.wait_for_nodes()
results = []
for taken in (0, 1):
    others = ray.util.placement_group([{"GPU": taken}] * 3, strategy="STRICT_SPREAD") if taken else None
    if others:
        ray.get(others.ready(), timeout=60)
    resources = ResourcesConfig(trainers=8, engines=3 if taken else 2, tensor_parallel_size=2 if taken else 4)
    device = Device("cuda", 12)
    group = ray_cluster.reserve_gpus(ray, device.gpus_needed(resources))
    gpus = ray_cluster.reserved_gpus(ray, group)
    node_of = {gpu.bundle: gpu.node for gpu in gpus}
    engines = place_models(resources, device.counts(resources), gpus).places["engines"]
    results.append([len({node_of[bundle] for bundle in place.bundles}) for place in engines])
    ray.util.remove_placement_group(group)
print(json.dumps(results))
ray.shutdown()
cluster.shutdown()
"""
CASES: dict[str, dict[str, Any]] = {
    "one to one": {"trainers": 3, "engines": 3},
    "two to an engine": {"trainers": 4, "engines": 2, "tensor_parallel_size": 2},
    "disaggregated": {"trainers": 1, "engines": 3, "placement": "disaggregated"},
    "models": {
        "trainers": 1,
        "models": {"critic": {"gpus": 1}, "reference": {"gpus": 2}, "reward": {"colocate_with": "critic"}},
    },
    "six judges": {"trainers": 1, "engines": 1, "judges": 6},
}
Seen = dict[str, dict[str, list[dict[str, str]]]]


def output_of(script: str, *arguments: str, **variables: str) -> Any:
    """The JSON on the last line that a script prints, whose Ray has a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # a short path, for Ray's sockets
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *arguments],
        # PYTHONPATH for the actors, which make an object of this folder; RAY_TMPDIR for Ray's clusters of several nodes
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(folder), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def seen() -> Seen:
    """The environments of the actors in each case, over a shared Ray, which takes seconds to start."""
    environments: Seen = output_of(SCRIPT, json.dumps(CASES))
    return environments


@pytest.mark.slow
def test_engines_over_several_gpus_of_a_cluster_are_on_one_node_each() -> None:
    """Three nodes with four GPUs, all of them free, and then one of each in use by others. Taken by Ray's numbers, both engines
    of four GPUs crossed nodes."""
    assert output_of(NODES) == [[1, 1], [1, 1, 1]]


@pytest.mark.slow
def test_each_rank_shares_a_gpu_with_the_engine_of_the_same_number(seen: Seen) -> None:
    trainers, engines, judges = seen["one to one"].values()
    assert judges[0]["CUDA_VISIBLE_DEVICES"] == trainers[0]["CUDA_VISIBLE_DEVICES"]
    gpus = [trainer["CUDA_VISIBLE_DEVICES"] for trainer in trainers]
    assert len(set(gpus)) == 3
    assert [engine["CUDA_VISIBLE_DEVICES"] for engine in engines] == gpus
    assert [engine["WHO"] for engine in engines] == ["engines 0", "engines 1", "engines 2"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_each_rank_sees_its_own_gpu_where_ray_hides_none() -> None:
    """With this variable, which some clusters set, every rank would otherwise compute on the first GPU. The four GPUs have
    the numbers 4 to 7 here."""
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    cases = {"one to one": CASES["one to one"], "two to an engine": CASES["two to an engine"]}
    of_case: Seen = output_of(SCRIPT, json.dumps(cases), **variables)
    trainers, engines, _ = of_case["one to one"].values()
    gpus = [trainer["CUDA_VISIBLE_DEVICES"] for trainer in trainers]
    assert len({*gpus}) == 3
    assert {*gpus} < {"4", "5", "6", "7"}
    assert [engine["CUDA_VISIBLE_DEVICES"] for engine in engines] == gpus
    of_two = of_case["two to an engine"]["engines"]
    assert {engine["CUDA_VISIBLE_DEVICES"] for engine in of_two} == {"4,5,6,7"}, "vLLM sets it for its workers"


@pytest.mark.slow
def test_the_workers_of_an_engine_over_two_gpus_claim_the_gpus(seen: Seen) -> None:
    trainers, engines, _ = seen["two to an engine"].values()
    assert len({trainer["CUDA_VISIBLE_DEVICES"] for trainer in trainers}) == 4
    assert all(not engine["GPUS"] for engine in engines)
    resources = ResourcesConfig(**CASES["two to an engine"])
    device = Device("cuda", 4)
    second = place_models(resources, device.counts(resources), [Gpu("node", n) for n in range(4)]).places["engines"][1]
    assert device.engine_environment(resources, second)["VLLM_RAY_BUNDLE_INDICES"] == "2,3"
    assert device.engine_options(resources, 16)["distributed_executor_backend"] == "ray"


@pytest.mark.slow
def test_disaggregated_engines_have_separate_gpus(seen: Seen) -> None:
    of_roles = seen["disaggregated"]
    gpus = [environment["CUDA_VISIBLE_DEVICES"] for role in ("policy", "engines") for environment in of_roles[role]]
    assert len(set(gpus)) == 4


@pytest.mark.slow
def test_any_number_of_reward_models_starts_on_a_gpu_beside_a_rank_and_an_engine(seen: Seen) -> None:
    """All at the same time: Ray starts no actor whose claim is not left."""
    gpus = {role: [each["CUDA_VISIBLE_DEVICES"] for each in of_role] for role, of_role in seen["six judges"].items()}
    assert gpus["policy"] == gpus["engines"]
    assert gpus["reward"] == gpus["policy"] * 6


@pytest.mark.slow
def test_each_model_has_the_gpus_that_the_recipe_gives_it(seen: Seen) -> None:
    gpus = {role: [each["CUDA_VISIBLE_DEVICES"] for each in of_role] for role, of_role in seen["models"].items()}
    assert gpus["engines"] == gpus["policy"]
    assert gpus["reward"] == gpus["critic"]
    assert len({*gpus["policy"], *gpus["critic"], *gpus["reference"]}) == 4


@pytest.mark.parametrize(
    ("wanted", "trainers", "engines"),
    [({}, 2, 2), ({"engines": 3}, 1, 3), ({"trainers": 3}, 3, 1), ({"tensor_parallel_size": 2}, 2, 1)],
)
def test_unrequested_gpus_are_distributed(wanted: dict[str, int], trainers: int, engines: int) -> None:
    device, resources = Device("cuda", 4), ResourcesConfig(placement="disaggregated", **wanted)
    assert (device.trainers(resources), device.engines(resources)) == (trainers, engines)


@pytest.mark.parametrize(
    ("kind", "wanted", "trainers", "of_trainer", "of_engine"),
    [
        ("cpu", {}, 1, 8, 8),
        ("cpu", {"trainers": 2}, 2, 4, 4),
        ("cpu", {"trainers": 3, "engines": 1}, 3, 2, 8),
        ("cpu", {"engines": 2, "tensor_parallel_size": 2}, 1, 8, 2),
        ("cpu", {"trainers": 16}, 16, 1, 1),
        ("cpu", {"trainers": 2, "threads": 3}, 2, 3, 3),
        ("cuda", {}, 8, 1, 1),
        ("cuda", {"offload_optimizer": True}, 8, 4, 1),
        ("cuda", {"offload_optimizer": True, "trainers": 3, "engines": 1}, 3, 10, 1),
        ("cuda", {"offload_optimizer": True, "threads": 3}, 8, 3, 3),
    ],
)
def test_processes_that_compute_at_the_same_time_divide_the_cores(
    kind: Literal["cpu", "cuda"],
    wanted: dict[str, Any],
    trainers: int,
    of_trainer: int,
    of_engine: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine with 8 cores, or with 8 GPUs and 32 cores."""
    monkeypatch.setattr(devices, "physical_cores", lambda: 32)
    device, resources = Device(kind, 8), ResourcesConfig(**wanted)
    assert device.trainers(resources) == trainers
    assert device.trainer_environment(resources, trainers)["OMP_NUM_THREADS"] == str(of_trainer)
    assert device.engine_environment(resources, Place())["OMP_NUM_THREADS"] == str(of_engine)
    numbers = device.rounding(resources.on(kind))
    assert (numbers["threads"], numbers["engine_threads"]) == (of_trainer, of_engine)


def test_ranks_on_several_machines_divide_the_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "physical_cores", lambda: 32)
    assert Device("cuda", 16).trainer_threads(ResourcesConfig(offload_optimizer=True), world=16, on_machine=8) == 4
    assert Device("cpu", 8).trainer_threads(ResourcesConfig(trainers=4), world=4, on_machine=2) == 2


def test_engines_on_a_gpu_multiply_in_full_fp32() -> None:
    """vLLM computes attention in fp32 by Triton's kernels, and Triton multiplies in TF32 unless this variable says otherwise:
    log-probabilities would differ from the model's by more than the check of an engine's weights allows."""
    environment = Device("cuda", 1).engine_environment(ResourcesConfig(), Place((0,), 0.45))
    assert environment["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.parametrize(
    ("wanted", "share", "sleeps"),
    [
        ({}, 0.4, True),
        ({"placement": "disaggregated"}, 0.9, False),
        ({"gpu_memory_utilization": 0.55}, 0.55, True),
        ({"placement": "disaggregated", "gpu_memory_utilization": 0.55}, 0.55, False),
    ],
)
def test_an_engine_alone_on_its_gpu_takes_most_of_it_and_one_beside_a_trainer_releases_all(
    wanted: dict[str, Any], share: float, sleeps: bool
) -> None:
    options = Device("cuda", 8).engine_options(ResourcesConfig(**wanted), 0)
    assert options["gpu_memory_utilization"] == share
    assert options["enable_sleep_mode"] is options["sleep_mode_offload_cudagraph"] is sleeps


@pytest.mark.parametrize("wanted", [{"offload_optimizer": True}, {"models": {"critic": {"offload_optimizer": True}}}])
def test_an_optimiser_that_steps_on_the_cpu_has_all_cores(
    wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "physical_cores", lambda: 32)
    assert Device("cuda", 8).trainer_threads(ResourcesConfig(**wanted), world=8, on_machine=8) == 4
    assert Device("cuda", 8).trainer_threads(ResourcesConfig(), world=8, on_machine=8) == 1


@pytest.mark.parametrize(
    ("kind", "wanted", "turns"),
    [
        ("cpu", {}, True),
        ("cpu", {"threads": 4}, False),
        ("cpu", {"threads": 5}, True),
        ("cpu", {"trainers": 2, "engines": 2, "threads": 2}, False),
        ("cpu", {"trainers": 2, "tensor_parallel_size": 4, "threads": 2}, True),
        ("cuda", {}, True),
        ("cuda", {"placement": "disaggregated"}, False),
    ],
)
def test_trainers_and_engines_take_turns_if_they_share_gpus_or_have_more_threads_than_cores(
    kind: Literal["cpu", "cuda"], wanted: dict[str, Any], turns: bool
) -> None:
    assert Device(kind, 8).take_turns(ResourcesConfig(**wanted)) is turns


def test_too_few_gpus_are_an_error_that_names_the_fields_to_lower() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"2 trainers and 2 engines of 2 GPUs, colocated, need 4 GPUs, and there are 2; lower"
    ):
        Device("cuda", 2).gpus_needed(ResourcesConfig(trainers=2, engines=2, tensor_parallel_size=2))
    assert Device("cpu", 2).gpus_needed(ResourcesConfig(trainers=2, engines=2)) == 0


@pytest.mark.parametrize(
    ("kind", "multiplies_bf16", "expected"),
    [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda", False, "bfloat16")],
)
def test_half_precision_is_computed_where_the_device_has_instructions_for_it(
    kind: Literal["cpu", "cuda"], multiplies_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them torch multiplies bf16 at 1 GFLOP/s and fp32 at 81, on a core of an AMD EPYC: an engine seems to hang."""
    monkeypatch.setattr(devices, "cpu_multiplies_bf16", lambda: multiplies_bf16)
    assert Device(kind, 2).inference_dtype("bfloat16") == expected
    assert Device(kind, 2).inference_dtype("float32") == "float32"


def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match=r"resources\.device is `cuda`, but there is no GPU"):
        Device.detect("cuda", gpus=0)


@pytest.mark.parametrize(("kind", "tokens"), [("cpu", 2048), ("cuda", 8192)])
def test_the_budget_of_a_micro_batch_follows_the_device(kind: Literal["cpu", "cuda"], tokens: int) -> None:
    assert ResourcesConfig().on(kind).token_budget == tokens
    assert ResourcesConfig(max_tokens_per_microbatch=300).on(kind).token_budget == 300
    assert Device(kind, 2).rounding(ResourcesConfig().on(kind))["max_tokens_per_microbatch"] == tokens
    halved = ResourcesConfig().on(kind).model_copy(update={"max_tokens_per_microbatch": tokens // 2})
    assert halved.on(kind).token_budget == tokens // 2, "a restart with less is not undone"


@pytest.mark.parametrize(
    ("kind", "wanted", "parameters", "expected"),
    [
        ("cpu", None, 49_000_000, None),
        ("cpu", None, 134_515_008, "selective"),
        ("cpu", False, 134_515_008, None),
        ("cuda", None, 494_000_000, None),
        ("cuda", None, 1_543_000_000, "all"),
        ("cuda", "selective", 8_000_000_000, "selective"),
        ("cuda", False, 8_000_000_000, None),
        ("cpu", True, 1_000, "all"),
    ],
)
def test_large_models_recompute_activations(
    kind: Literal["cpu", "cuda"], wanted: Any, parameters: int, expected: str | None
) -> None:
    resources = ResourcesConfig(gradient_checkpointing=wanted)
    assert recomputed_activations(resources, Device(kind, 1), parameters) == expected
