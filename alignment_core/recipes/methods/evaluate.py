"""The method ``evaluate``: models side by side, without training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints, model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.evaluation import EvaluationConfig
from alignment_core.recipes.sections.model import ModelConfig

BASELINE = "model"
"""What tables call the recipe's ``model``."""
TAKEN = (BASELINE, "evaluation", "report")


class EvaluateRecipe(BaseRecipe):
    """Models on the same held-out prompts, compared with the first one."""

    method: Literal["evaluate"] = "evaluate"
    """An evaluation alone."""
    models: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")], ModelConfig] = {}
    """Other models by the names that tables call them; `model` is the one that they are compared with."""
    evaluation: EvaluationConfig
    """Prompts, sampling and what judges the completions."""

    @model_validator(mode="after")
    def _only_judges(self) -> EvaluateRecipe:
        if self.promotion is not None:
            raise ValueError("`promotion` has no effect, as no policy is made: leave it out, and use `align promote`")
        if taken := [name for name in self.models if name in TAKEN]:
            raise ValueError(f"`models.{taken[0]}`: tables call something else so; give it another name")
        return self


METHOD = Method(EvaluateRecipe, composition="alignment.flows.evaluate:evaluate")
