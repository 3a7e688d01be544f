"""The ranks of reinforcement learning: one group that holds policy, critic and reference, or several, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from alignment_core.cluster.group import ActorGroup
from alignment_core.cluster.layout import LearnerRole, groups_of
from alignment_core.errors import UserError
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import FrozenPlacement
from alignment_core.training.policy_trainer import PolicyTrainer, RlJob, averages
from alignment_core.training.rank_folders import write
from alignment_core.training.ranks import TrainerActors, open_job
from alignment_core.training.step_data import StepData

R = TypeVar("R")
Group = ActorGroup[PolicyTrainer]
REFERENCE = "reference_logps"
"""The result of the reference's forward pass."""


class PolicyGroups:
    """Calls of :class:`PolicyTrainer` on the ranks that hold the model in question."""

    def __init__(self, groups: Mapping[LearnerRole, Group], rests: bool = False) -> None:
        """``groups``: the ranks of each model; several models may have the same ones. ``rests``: whether those that share GPUs
        with the engines rest while these sample."""
        self.by_role = groups
        self.rests = rests
        self.groups: list[Group] = list(dict.fromkeys(groups.values()))
        """All groups, the policy's first."""
        self._for_policy: dict[str, np.ndarray] = {}
        """Results of a reference that is not with the policy."""

    @property
    def policy(self) -> Group:
        return self.by_role["policy"]

    def load(self, batch: StepData, critic_units: tuple[float, float]) -> None:
        """See :meth:`PolicyTrainer.load`."""
        self._all(lambda group: group.all(PolicyTrainer.load, batch, critic_units))

    def forward(self, old: bool, wanted: Sequence[str]) -> dict[str, np.ndarray]:
        """See :meth:`PolicyTrainer.forward`."""
        is_apart = self.by_role.get("reference", self.policy) is not self.policy
        names = [*wanted, *([REFERENCE] if is_apart else [])]
        results = self._all(lambda group: group.all(PolicyTrainer.forward, old, names)[0])
        columns = {name: column for result in results for name, column in result.items()}
        self._for_policy = {REFERENCE: columns[REFERENCE]} if is_apart else {}
        return {name: columns[name] for name in wanted}

    def update(
        self, numbers: Mapping[str, np.ndarray], kl_coefficient: float, of_values: tuple[float, float]
    ) -> dict[str, float]:
        """See :meth:`PolicyTrainer.update`; metrics of all models."""
        numbers = {**numbers, **self._for_policy}
        reports = self._all(lambda group: group.all(PolicyTrainer.update, numbers, kl_coefficient, of_values))
        return {name: value for of_group in reports for name, value in averages(of_group).items()}

    def end_step(self) -> None:
        """See :meth:`PolicyTrainer.end_step`."""
        self._all(lambda group: group.all(PolicyTrainer.end_step))

    def empty_cache(self) -> None:
        """See :meth:`PolicyTrainer.empty_cache`."""
        self._all(lambda group: group.all(PolicyTrainer.empty_cache))

    def rest(self, keep_policy: bool = False) -> None:
        """See :meth:`PolicyTrainer.rest`; of the policy's ranks, because engines are never on GPUs of other models alone. Does
        nothing if they do not rest in this run."""
        if self.rests:
            self.policy.all(PolicyTrainer.rest, keep_policy)

    def wake(self) -> None:
        """See :meth:`PolicyTrainer.wake`."""
        if self.rests:
            self.policy.all(PolicyTrainer.wake)

    def export(self, name: str, folder: Path, adapter: Path | None = None, masters: Path | None = None) -> None:
        """See :meth:`PolicyTrainer.export`."""
        folders = [path for path in (folder, adapter, masters) if path]
        group = self.by_role["critic"] if name == "critic" else self.policy
        write(group, folders, PolicyTrainer.export, name, folder, adapter, masters)

    def _all(self, function: Callable[[Group], R]) -> list[R]:
        return _side_by_side([partial(function, group) for group in self.groups])


def open_groups(trainers: TrainerActors, job: RlJob, resources: ResourcesConfig, rests: bool = False) -> PolicyGroups:
    """Give the ranks of each model their part of the job, as ``resources.models`` places them. ``rests``: see
    :class:`PolicyGroups`.

    Raises UserError for a reference that must be with the policy.
    """
    roles: list[LearnerRole] = ["policy"]
    if job.critic is not None:
        roles.append("critic")
    if job.section.kl.coefficient > 0:
        roles.append("reference")
    by_host = groups_of(resources, roles)
    is_placed = "reference" in roles and resources.models.reference != FrozenPlacement()
    if is_placed and (problem := job.section.why_reference_is_beside(job.reference is not None)):
        raise UserError(f"resources.models.reference: {problem}")

    def opened(host: LearnerRole, held: Sequence[LearnerRole]) -> Group:
        ranks = trainers if host == "policy" else replace(trainers, group=trainers.learners(host))
        return open_job(ranks, replace(job, roles=tuple(held)), resources)

    groups = _side_by_side([partial(opened, host, held) for host, held in by_host.items()])
    by_role = {role: group for group, held in zip(groups, by_host.values(), strict=True) for role in held}
    return PolicyGroups(by_role, rests)


def _side_by_side(functions: Sequence[Callable[[], R]]) -> list[R]:
    """The results of functions that run at the same time; the first error is raised once all have ended."""
    if len(functions) == 1:
        return [functions[0]()]
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result() for future in [pool.submit(function) for function in functions]]
