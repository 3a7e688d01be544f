"""The method ``evaluate``: models side by side on held-out prompts, without training."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, model_validator

from alignment_core.composition import steps
from alignment_core.composition.branches import independent
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import BranchFailed, artifact, current
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.init.text import Commented
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.evaluation import EvaluationConfig
from alignment_core.recipes.sections.model import ModelConfig

BASELINE = "model"
"""Label of the recipe's ``model`` in tables."""
TAKEN = (BASELINE, "evaluation", "report")


class EvaluateRecipe(BaseRecipe):
    """Models on the same held-out prompts, compared with the first one."""

    method: Literal["evaluate"] = "evaluate"
    """An evaluation alone."""
    models: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")], ModelConfig] = {}
    """Other models by their names in tables. They are compared with `model`."""
    evaluation: EvaluationConfig
    """Prompts, sampling, and judges of the completions."""

    @model_validator(mode="after")
    def _only_judges(self) -> EvaluateRecipe:
        if self.promotion is not None:
            raise ValueError("`promotion` has no effect, as no policy is made: leave it out, and use `align promote`")
        if taken := [name for name in self.models if name in TAKEN]:
            raise ValueError(f"`models.{taken[0]}`: tables call something else so; give it another name")
        return self


def compose(recipe: EvaluateRecipe) -> Outputs:
    """Compose the recipe. A model that cannot be loaded or sampled from is left out, unless all are."""
    base = steps.base_model("model", recipe.model)
    with independent():
        models = {name: steps.base_model(name, model) for name, model in recipe.models.items()}
    base_model = artifact(base)
    for name, model in models.items():
        with suppress(BranchFailed):  # it is left out below
            other_model = artifact(model)
            if base_model and other_model:
                cure = "evaluate it in a recipe of its own"
                check_same_tokenizer(current().store, base_model, other_model, f"models.{name}", cure)
    evaluations = Evaluations(recipe, base, None)
    evaluations.add(BASELINE, base)
    with independent():
        for label, model in models.items():
            evaluations.add(label, model)
    failed = evaluations.leave_out_failed()
    if models and models.keys() <= failed.keys():
        raise next(iter(failed.values()))
    return Outputs(report=evaluations.report(), evaluations=evaluations)


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from prompts; with labels, a verifier measures accuracy."""
    room = sections.answer_room(profile, least=256)
    section: dict[str, Any] = {
        "prompts": sections.prompts(profile, profile.sources, room),
        "generation": sections.generation(1, room),
    }
    if profile.verifier:
        section["verifier"] = Commented(profile.verifier, "says which answers are right, by the label")
    section["generation"] |= sections.decoding("verifier" in section)
    others = Commented({}, "others to compare with, such as {tuned: policy/production}")
    return {"evaluation": section, "models": others}


METHOD = Method(
    EvaluateRecipe,
    compose,
    init=Init(
        kinds=("prompts",), sections=init_sections, why="prompts to measure models on", evaluates=False, promotes=False
    ),
)
