"""All stages of a recipe together: seconds, GPU hours, tokens and money, and the first thing that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.estimate import Estimate, estimate
from alignment_core.capacity.nearest import Placement, nearest
from alignment_core.capacity.workload import Work
from alignment_core.cluster.layout import gpus_needed
from alignment_core.recipes import ResourcesConfig


@dataclass(frozen=True)
class Capacity:
    """The cost of a recipe."""

    cluster: Cluster
    estimates: tuple[Estimate, ...]
    gpus: int
    """GPUs that the placement uses."""
    price: float | None
    """Of a GPU hour."""
    alternative: Placement | None = None
    """The nearest placement that fits, where the recipe's does not."""

    @property
    def problems(self) -> list[str]:
        return [f"{each.stage}: {problem}" for each in self.estimates for problem in each.problems]

    @property
    def seconds(self) -> float | None:
        """Of all stages; None if the number of steps of any is unknown."""
        totals = [each.total for each in self.estimates]
        return None if None in totals else sum(total for total in totals if total is not None)

    @property
    def gpu_hours(self) -> float | None:
        """All GPUs are reserved for the whole run."""
        return None if self.seconds is None else self.cluster.gpus * self.seconds / 3600

    def as_object(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        hours = self.gpu_hours
        return {
            "status": "fits" if not self.problems else "does not fit",
            "hardware": self.cluster.hardware.name,
            "gpus": self.cluster.gpus,
            "gpus_used": self.gpus,
            "parameters": self.cluster.model.parameters,
            "stages": [_stage(each) for each in self.estimates],
            "seconds": self.seconds,
            "gpu_hours": hours,
            "money": None if hours is None or self.price is None else hours * self.price,
            "problems": self.problems,
            "nearest": None
            if self.alternative is None
            else {
                "changes": self.alternative.changes,
                "stages": [_stage(each) for each in self.alternative.estimates],
            },
        }


def capacity(
    works: Sequence[Work], resources: ResourcesConfig, cluster: Cluster, price: float | None = None
) -> Capacity:
    """The cost of these stages and, if they do not fit, the nearest placement that does."""
    estimates = tuple(estimate(work, resources, cluster) for work in works)
    does_not_fit = any(each.problems for each in estimates)
    alternative = nearest(works, resources, cluster) if does_not_fit else None
    used = gpus_needed(resources, cluster.device.counts(resources))
    return Capacity(cluster, estimates, used, price, alternative)


def _stage(each: Estimate) -> dict[str, Any]:
    return {
        "stage": each.stage,
        "seconds_per_step": each.step,
        "parts": each.seconds,
        "steps": each.steps,
        "once": each.once,
        "seconds": each.total,
        "tokens_per_step": each.tokens,
        "memory": [
            {
                "where": peak.where,
                "moment": peak.moment,
                "bytes": peak.size,
                "usable": peak.capacity,
                "parts": peak.parts,
            }
            for peak in each.peaks
        ],
        "models": [
            {"name": role.name, "ranks": role.ranks, "terms": role.terms, "host_bytes": role.host}
            for role in each.roles
        ],
        "problems": list(each.problems),
        "notes": list(each.notes),
    }
