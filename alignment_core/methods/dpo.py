"""The method ``dpo``: direct preference optimisation on given pairs, after SFT if the recipe has that section."""

from __future__ import annotations

from typing import Any, Literal

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.results import Outputs
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.init.text import Commented
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.training import DpoConfig, SftConfig


class DpoRecipe(BaseRecipe):
    """DPO, IPO or cDPO on a fixed set of pairs."""

    method: Literal["dpo"] = "dpo"
    """Direct preference optimisation on given pairs."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first."""
    dpo: DpoConfig
    """Pairs and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        measured = self.dpo.training.measured(self.dpo.data, "test_margin", "test_accuracy", "test_loss")
        return (*super().measured_in_training, *measured)


def compose(recipe: DpoRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    pairs = steps.dataset("dpo/data", recipe.dpo.data, "preferences", base)
    policy = steps.dpo("dpo", recipe.dpo.training, recipe.dpo.loss, start, pairs)
    return Evaluations(recipe, base).outputs({"start": start, "dpo": policy})


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from preference pairs."""
    loss = {"beta": Commented(0.1, "the lower, the further the policy may move")}
    section = {"data": sections.data(profile), "loss": loss, "training": sections.preference_training(profile)}
    return {"dpo": section, **sections.evaluation(profile, verifier=False)}


METHOD = Method(
    DpoRecipe,
    compose,
    decides={
        "dpo/data": "dpo.data",
        "dpo/reference-logps:order": "the order of the rows",
        "dpo/reference-logps:ld_alpha": "dpo.loss.ld_alpha",
        "dpo/reference-logps": "dpo.training",
        "dpo": "dpo",
    },
    init=Init(
        kinds=("preferences",),
        sections=init_sections,
        why="pairs of a better and a worse answer",
        rank=20,
        formats=("preference", "hh"),
    ),
)
