"""Variants of one recipe, as branches of one graph → one table of them → the best one's results are the run's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignment.flows.results import Outputs
from alignment.tasks.branches import Branch, branch, common_labels, sharing
from alignment.tasks.graph import BranchFailed, Step, failure, metrics
from alignment.tasks.sweep import variants
from alignment_core.errors import UserError
from alignment_core.recipes.methods import method_of
from alignment_core.recipes.methods.sweep import SweepRecipe


def sweep(recipe: SweepRecipe) -> Outputs:
    """Compose each variant by its method's own composition, and rank those that do not fail.

    Raises the failure of the first variant if all fail.
    """
    compositions = {name: (one.seed, _composing(one)) for name, one in recipe.variants.items()}
    made: dict[str, Outputs] = {}
    branches: dict[str, Branch] = {}
    failed: dict[str, BranchFailed] = {}
    with sharing(common_labels(compositions)):
        for name, (seed, compose) in compositions.items():
            with branch(name, seed) as branches[name]:
                try:
                    made[name] = compose()
                except BranchFailed as error:  # a composition that waits for its stages
                    failed[name] = error
        _check_comparable(recipe.ranks, made)
        failed |= {name: problem for name in made if (problem := failure(branches[name].asked.values()))}
        if len(failed) == len(compositions):
            raise next(iter(failed.values()))
        made = {name: outputs for name, outputs in made.items() if name not in failed}
        measuring = {name: _measuring(outputs) for name, outputs in made.items()}
        reasons = {name: str(failed[name]) for name in compositions if name in failed}
        table = variants("variants", recipe.ranks, recipe.fields_of, measuring, reasons)
    best = (metrics(table) or {}).get("best") or next(iter(made))
    return made[best].model_copy(update={"summary": table})


def _composing(one: Any) -> Callable[[], Outputs]:
    return lambda: method_of(one).compose()(one)


def _measuring(outputs: Outputs) -> Step:
    """The stage whose metrics say how good a variant is: of its evaluation, or of its training."""
    if outputs.evaluations is not None and outputs.final in outputs.evaluations.steps:
        return outputs.evaluations.steps[outputs.final]
    found: Step | None = outputs.policy if outputs.policy is not None else outputs.reward_model
    if found is None:
        raise UserError("base: it trains nothing, so that there is nothing to rank")
    return found


def _check_comparable(metric: str, made: dict[str, Outputs]) -> None:
    """Raise UserError if a metric compares each variant with something of its own."""
    name = metric.partition(".")[0]
    judges = {_name(one.reward_model) for one in made.values()}
    baselines = {
        _name(one.evaluations.baseline[1]) for one in made.values() if one.evaluations and one.evaluations.baseline
    }
    if name in ("reward", "win_rate") and len(judges) > 1:
        raise UserError(f"rank_by: every variant has a reward model of its own, so that {metric!r} cannot rank them")
    if name in ("win_rate", "judged_win_rate", "kl") and len(baselines) > 1:
        raise UserError(
            f"rank_by: {metric!r} compares each variant with a start of its own, so that it cannot rank them"
        )


def _name(made: Any) -> str:
    return str(getattr(made, "label", made))
