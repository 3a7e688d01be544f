"""The method ``comparison``: several methods from one start, as branches of one graph, evaluated side by side."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from alignment_core.composition.base_model import base_and_start, reward_model
from alignment_core.composition.branches import Branch, branch, sharing
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import BranchFailed, Step, failure
from alignment_core.composition.results import Outputs
from alignment_core.recipes.load import parse_part
from alignment_core.recipes.methods import METHODS, Method, method, method_of
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.evaluation import EvaluationConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig

OURS = "ours"
"""Stands in a branch for a section of the comparison."""
TAKEN = ("model", "sft", "start", "reward-model", "evaluation", "report", "production", "promotion")
"""Labels of the comparison's own stages."""


class ComparisonRecipe(BaseRecipe):
    """SFT → branches, one method each → evaluation of all against SFT → promotion of one."""

    method: Literal["comparison"] = "comparison"
    """Several methods from one start, side by side."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first; every branch starts from the result. Default: they start from `model`, or from an
    `sft` of their own."""
    reward_model: RewardModelConfig | None = None
    """A reward model that judges the policies, and that branches use with `reward_model: ours`."""
    branches: dict[str, dict[str, Any]] = Field(min_length=1)
    """The branches by name: `method`, and the sections that a recipe of this method has. `ours` in place of a section stands
    for that of the comparison: `reward_model: ours`, `evaluation: ours`. A branch may be a comparison with branches and an
    `evaluation` of its own; this one evaluates its `result`."""
    result: str = ""
    """The branch whose policy is the result of the run, and may be promoted. Default: the first one."""
    evaluation: EvaluationConfig
    """How the policies are judged."""
    _recipes: dict[str, BaseRecipe] = PrivateAttr(default_factory=dict)

    @property
    def recipes(self) -> dict[str, BaseRecipe]:
        """The branches as recipes of their own."""
        return self._recipes

    @property
    def final(self) -> str:
        """The branch whose policy is the result."""
        return self.result or next(iter(self.branches))

    @model_validator(mode="after")
    def _branches_are_recipes(self, info: ValidationInfo) -> ComparisonRecipe:
        for name, content in self.branches.items():
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name) or name in TAKEN:
                raise ValueError(
                    f"`branches`: {name!r} cannot name a branch: use small letters, digits, dots and dashes, and none of "
                    f"{', '.join(TAKEN)}"
                )
            recipe = self._recipes[name] = self._recipe(name, content, info)
            read = recipe.model_dump(mode="json", exclude_unset=True)  # paths are absolute
            self.branches[name] = {key: value if value == OURS else read[key] for key, value in content.items()}
        if self.result not in ("", *self.branches):
            raise ValueError(f"`result`: there is no branch {self.result!r}; choose one of {', '.join(self.branches)}")
        if all(content.get("reward_model") != OURS for content in self.branches.values()):
            self.check_used((), "evaluation.rewards")
        return self

    def _recipe(self, name: str, content: dict[str, Any], info: ValidationInfo) -> BaseRecipe:
        where, shares = f"branches.{name}", set(BaseRecipe.model_fields) - {"method", "evaluation"}
        if self.sft is not None:
            shares.add("sft")
        if own := sorted(shares & content.keys()):
            raise ValueError(f"`{where}.{own[0]}` belongs to the comparison, which all branches share: remove it")
        shared: dict[str, Any] = {"name": f"{self.name}-{name}", "seed": self.seed, "model": self.model.model_dump()}
        shared["resources"] = {"device": self.resources.device}  # on which the default of `bf16` depends
        if content.get("method") in METHODS.names():
            branch_method = method(content["method"])
            if branch_method.run is not None:
                raise ValueError(
                    f"`{where}.method`: {branch_method.name!r} cannot be a branch: it is more than one graph"
                )
            if self.sft is not None and "sft" not in branch_method.recipe.model_fields:
                raise ValueError(
                    f"`{where}.method`: {branch_method.name!r} cannot start from `sft`: leave out one of them"
                )
            if self.sft is not None:
                shared["sft"] = self.sft.model_dump()
        for section in [section for section, value in content.items() if value == OURS]:
            if getattr(self, section, None) is None:
                raise ValueError(f"`{where}.{section}` is `ours`, but the comparison has no section `{section}`")
            shared[section] = getattr(self, section).model_dump()
        return parse_part({**content, **shared}, where, info)


def compose(recipe: ComparisonRecipe) -> Outputs:
    """Compose the start, each branch by its method's own composition, and the evaluations of those that do not fail.

    Raises the failure of the first branch if all fail. If that of the run's policy fails, the run has none.
    """
    baseline = "sft" if recipe.sft else "start"
    with sharing():
        base, start = base_and_start(recipe, recipe.sft)
        judge = reward_model(recipe.reward_model, base, start)
        policies = {baseline: start}
        branches: dict[str, Branch] = {}
        failed: dict[str, BranchFailed] = {}
        comparisons: dict[str, Step] = {}
        for name, branch_recipe in recipe.recipes.items():
            with branch(name) as branches[name]:
                try:
                    outputs: Outputs = method_of(branch_recipe).compose(branch_recipe)
                except BranchFailed as error:  # a composition that waits for its stages
                    failed[name] = error
                    continue
            policies[name] = outputs.policy
            if outputs.report is not None:  # of an evaluation of its own
                comparisons[name] = outputs.report
            comparisons |= {f"{name}/{inner}": report for inner, report in outputs.comparisons.items()}
        evaluations = Evaluations(recipe, base, judge)
        for label, policy in policies.items():
            if policy is not None:  # the result of a comparison that failed
                evaluations.add(label, policy)
        for name, composed in branches.items():
            goes_on = isinstance(recipe.recipes[name], ComparisonRecipe) and policies.get(name) is not None
            if not goes_on and (problem := failure(composed.steps.values())):
                failed[name] = problem
        failed |= evaluations.leave_out_failed()
        if branches.keys() <= failed.keys():
            raise next(iter(failed.values()))
        report = evaluations.report()
    return Outputs(
        policy=None if recipe.final in failed else policies[recipe.final],
        reward_model=judge,
        report=report,
        final=recipe.final,
        baseline=baseline,
        evaluations=evaluations,
        comparisons=comparisons,
    )


METHOD = Method(ComparisonRecipe, compose, aliases=("compare", "benchmark", "ablation"))
