"""The nearest placement that fits: as few fields of ``resources`` changed as possible and, among these, the fastest step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.estimate import Estimate, estimate
from alignment_core.capacity.workload import LEARNED, Reinforcement, Sampling, Training, Work
from alignment_core.checks.shapes import why_not_together
from alignment_core.models.tensor_shapes import why_not_split
from alignment_core.recipes import ResourcesConfig, TrainingConfig

MOST_CHANGES = 4
BUDGETS = (4096, 2048)
UTILIZATIONS = (0.9, 0.7, 0.5, 0.4, 0.3)
SHARDS = (2, 4, 8)


@dataclass(frozen=True)
class Placement:
    """Resources of which all stages fit."""

    changes: dict[str, Any]
    """New values by field of ``resources``."""
    resources: ResourcesConfig
    estimates: tuple[Estimate, ...]


def nearest(works: Sequence[Work], resources: ResourcesConfig, cluster: Cluster) -> Placement | None:
    """The nearest placement on these GPUs, or None if there is none with up to ``MOST_CHANGES`` changed fields."""
    options = _options(works, resources, cluster)
    for count in range(1, MOST_CHANGES + 1):
        every = [changes for fields in itertools.combinations(options, count) for changes in _of(fields)]
        placements = [_placement(works, resources, cluster, changes) for changes in every]
        fitting = [placement for placement in placements if placement is not None]
        if fitting:
            return min(fitting, key=lambda placement: sum(each.step for each in placement.estimates))
    return None


def _options(works: Sequence[Work], resources: ResourcesConfig, cluster: Cluster) -> list[tuple[str, list[Any]]]:
    """Other values of each field that may help."""
    options: list[tuple[str, list[Any]]] = [("gradient_checkpointing", [True]), ("zero_stage", [2, 3])]
    most = min(cluster.gpus, cluster.hardware.per_node)
    if any(isinstance(work, Sampling | Reinforcement) for work in works):
        options.append(("gpu_memory_utilization", [*UTILIZATIONS]))
        options.append(("tensor_parallel_size", [size for size in SHARDS if size <= most]))
        if cluster.gpus > 1:
            options.append(("placement", ["disaggregated"]))
    options += [("offload_optimizer", [True]), ("max_tokens_per_microbatch", [*BUDGETS])]
    budget = resources.on("cuda").token_budget
    trainings = [work for work in works if not isinstance(work, Sampling)]
    if any(_longest_row(work) > budget for work in trainings):
        fitting = [size for size in SHARDS if why_not_together(cluster.model.shape, size) is None]
        options.append(("sequence_parallel_size", fitting))
    if trainings and not any(_training(work).lora for work in trainings):
        fitting = [size for size in SHARDS if size <= most and why_not_split(cluster.model.shape, size) is None]
        options.append(("trainer_tensor_parallel_size", fitting))
    rewards = [scorer for work in works if isinstance(work, Reinforcement) for scorer in work.scorers]
    is_placed = resources.models.reward.gpus is not None or resources.models.reward_models
    if any(scorer.kind in LEARNED for scorer in rewards) and not is_placed:
        given = resources.models.model_dump(exclude_unset=True)
        sharded = [{**given, "reward": {"gpus": size, "zero_stage": 3}} for size in SHARDS if size < cluster.gpus]
        options.append(("models", sharded))
    unchanged = resources.model_copy(update={"gpu_memory_utilization": resources.engine_memory})
    return [
        (name, others)
        for name, values in options
        if (others := [value for value in values if value != getattr(unchanged, name)])
    ]


def _training(work: Training | Reinforcement) -> TrainingConfig:
    return work.training if isinstance(work, Training) else work.section.training


def _longest_row(work: Training | Reinforcement) -> int:
    """Tokens of a row, which is in one micro-batch."""
    return work.sequences * work.tokens if isinstance(work, Training) else work.prompt + work.completion


def _of(fields: Sequence[tuple[str, list[Any]]]) -> Iterator[dict[str, Any]]:
    names = [name for name, _ in fields]
    for values in itertools.product(*(values for _, values in fields)):
        yield dict(zip(names, values, strict=True))


def _placement(
    works: Sequence[Work], resources: ResourcesConfig, cluster: Cluster, changes: dict[str, Any]
) -> Placement | None:
    given = resources.model_dump(exclude_unset=True)
    try:
        changed = ResourcesConfig.model_validate({**given, **changes})
    except ValidationError:
        return None
    estimates = []
    for work in works:
        result = estimate(work, changed, cluster)
        if result.problems:
            return None
        estimates.append(result)
    return Placement(changes, changed, tuple(estimates))
