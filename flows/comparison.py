"""What a promotion is compared with: the policy that its tag points to, evaluated on the run's held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.composition.evaluations import PRODUCTION
from alignment_core.composition.graph import artifact
from alignment_core.composition.results import Outputs
from alignment_core.errors import UserError
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes import BaseRecipe


@dataclass(frozen=True)
class Compared:
    """With what gates compare: the policies ``final`` and ``baseline`` of the report, as it calls them."""

    expected: Reference | None
    """What the tag named then, and all that may be replaced."""
    final: str | None
    baseline: str | None
    report: Any
    problem: str | None = None
    """Why it could not be compared with what the tag names."""

    def beside(self, tag: str) -> str:
        """What gates compare with, in words."""
        if self.baseline == PRODUCTION and self.expected is not None:
            return f"{tag} ({self.expected.short})"
        return f"`{self.baseline}` of this run" if self.baseline else "nothing"


def compare(recipe: BaseRecipe, store: Store, outputs: Outputs) -> Compared:
    """Judge what the promotion's tag names beside the run's policy, once that is known, if a gate asks for it.

    There is nothing to judge where the tag names the run's own start or its result, or named its result before. A policy
    that is only planned may be anything, so its judgement is planned, too.
    """
    section, own = recipe.promotion, (outputs.final, outputs.baseline, outputs.report)
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
        why = (
            f"{section.tag} points to {current.short}, of another kind or with another tokenizer: it cannot be compared"
        )
        return Compared(current, *own, problem=f"{why}; align promote moves the tag by hand")
    final, report = outputs.evaluations.against(outputs.final, current)
    return Compared(current, final, PRODUCTION, report)


def measured_in_training(store: Store, outputs: Outputs) -> dict[str, float]:
    """What gates may ask of held-out rows: of the training that made the policy, and of the reward model's."""
    found = {f"test_{name}": value for name, value in _tested(store, outputs.policy).items()}
    judge = _tested(store, outputs.reward_model)
    return found | ({"reward_model_accuracy": judge["accuracy"]} if "accuracy" in judge else {})


def _tested(store: Store, made: Any) -> dict[str, float]:
    """The metrics ``test_<name>`` of the stage that made a step's output or an artifact, by name."""
    if made is None:
        return {}
    reference = made if isinstance(made, Reference) else made.artifact()
    measured = [record.metrics for record in store.records.makers(reference)]
    measured += [] if isinstance(made, Reference) else [made.result().metrics]
    return {
        name.removeprefix("test_"): value
        for metrics in measured
        for name, value in metrics.items()
        if name.startswith("test_") and isinstance(value, (int, float))
    }


def named_before(store: Store, tag: str, policy: Reference) -> bool:
    """Whether the tag names the policy, or has named it."""
    return any(move.to == policy for move in store.tags.history(tag))
