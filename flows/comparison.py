"""The comparison of a run's policy with the policy that its promotion's tag points to, on the run's held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.composition.evaluations import PRODUCTION
from alignment_core.composition.graph import BranchFailed, artifact
from alignment_core.composition.results import Outputs
from alignment_core.errors import UserError
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes import BaseRecipe


@dataclass(frozen=True)
class Compared:
    """The two policies that gates compare: ``final`` and ``baseline``, by their labels in the report."""

    expected: Reference | None
    """The artifact that the tag pointed to; the promotion replaces no other."""
    final: str | None
    baseline: str | None
    report: Any
    problem: str | None = None
    """Why the two policies cannot be compared."""
    failed: str | None = None
    """Label of the stage whose failure is the problem."""

    def beside(self, tag: str) -> str:
        """The baseline of the gates, in words."""
        if self.baseline == PRODUCTION and self.expected is not None:
            return f"{tag} ({self.expected.short})"
        return f"`{self.baseline}` of this run" if self.baseline else "nothing"


def compare(recipe: BaseRecipe, store: Store, outputs: Outputs) -> Compared:
    """Evaluate the policy that the promotion's tag points to beside the run's policy, if a gate compares the two.

    That is not needed if the tag points to the run's start or result, or has pointed to the result before. If the run's policy
    is only planned, the evaluation is planned, too. Waits for the run's policy, and the samples of the other one.
    """
    section = recipe.promotion
    own = (outputs.final, outputs.baseline, outputs.report)
    if outputs.evaluations is None:
        return Compared(outputs.replaces, *own)
    current = store.tags.get(section.tag) if section else None
    if section is None or current is None or outputs.policy is None:
        return Compared(current, *own)
    candidate = artifact(outputs.policy)
    if not any(gate.compares for gate in section.gates):
        return Compared(current, *own)
    if candidate is not None and named_before(store, section.tag, candidate):
        return Compared(current, *own)
    if artifact(outputs.evaluations.baseline[1]) == current:
        return Compared(current, *own)
    try:
        if candidate is not None:
            if current.kind != candidate.kind:
                raise UserError(f"{section.tag} points to a {current.kind}")
            check_same_tokenizer(store, candidate, current, section.tag, "it cannot be compared")
    except UserError:
        reason = (
            f"{section.tag} points to {current.short}, of another kind or with another tokenizer: it cannot be compared"
        )
        return Compared(current, *own, problem=f"{reason}; align promote moves the tag by hand")
    try:
        final, report = outputs.evaluations.against(outputs.final, current)
    except BranchFailed as error:
        if not isinstance(error.cause, UserError):  # of this machine, say: a later attempt compares them
            raise error.cause from None
        reason = f"{section.tag} points to {current.short}, which cannot be sampled on the prompts of this run: {error}"
        problem = f"{reason}; align promote moves the tag by hand"
        return Compared(current, *own, problem=problem, failed=outputs.evaluations.samples[PRODUCTION].label)
    return Compared(current, final, PRODUCTION, report)


def measured_in_training(store: Store, outputs: Outputs) -> dict[str, float]:
    """Metrics for gates that the trainings of the policy and of the reward model measured on their held-out rows."""
    policy = {f"test_{name}": value for name, value in _tested(store, outputs.policy).items()}
    reward_model = _tested(store, outputs.reward_model)
    return policy | ({"reward_model_accuracy": reward_model["accuracy"]} if "accuracy" in reward_model else {})


def _tested(store: Store, output: Any) -> dict[str, float]:
    """The metrics ``test_<name>`` of the stage that made a step's output or an artifact, by name."""
    if output is None:
        return {}
    reference = output if isinstance(output, Reference) else output.artifact()
    measured = [record.metrics for record in store.records.makers(reference)]
    measured += [] if isinstance(output, Reference) else [output.result().metrics]
    return {
        name.removeprefix("test_"): value
        for metrics in measured
        for name, value in metrics.items()
        if name.startswith("test_") and isinstance(value, (int, float))
    }


def named_before(store: Store, tag: str, policy: Reference) -> bool:
    """Whether the tag points to the policy, or has pointed to it before."""
    return any(move.to == policy for move in store.tags.history(tag))
