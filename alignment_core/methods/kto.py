"""The method ``kto``: Kahneman–Tversky optimisation on labelled completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from alignment_core.checks.traps import FEW_STEPS, KTO_BATCH
from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.results import Outputs
from alignment_core.data.fields import Fields
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.text import Commented, plain
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.kto import KtoConfig
from alignment_core.recipes.sections.training import SftConfig


class KtoRecipe(BaseRecipe):
    """KTO, or the unpaired form of APO-zero, on completions that are labelled desirable or undesirable."""

    method: Literal["kto"] = "kto"
    """Kahneman–Tversky optimisation on labelled completions."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first."""
    kto: KtoConfig
    """Labelled completions and training."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        measured = self.kto.training.measured(self.kto.data, "test_accuracy", "test_loss")
        return (*super().measured_in_training, *measured)


def compose(recipe: KtoRecipe) -> Outputs:
    """Compose the recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    rows = steps.dataset("kto/data", recipe.kto.data, "unpaired", base)
    policy = steps.kto("kto", recipe.kto.training, recipe.kto.loss, start, rows)
    return Evaluations(recipe, base).outputs({"start": start, "kto": policy})


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from completions with a thumb up or down."""
    loss = {"beta": Commented(0.1, "the lower, the further the policy may move")}
    training = sections.preference_training(profile)
    if plain(training["batch_size"]) < KTO_BATCH:
        rows = sections.trained_rows(profile) * (2 if "chosen" in profile.mapping.columns else 1)  # two of each pair
        steps = math.ceil(rows / KTO_BATCH)
        training["batch_size"] = Commented(KTO_BATCH, "rows in a step; the KL baseline is a mean over them")
        training["num_train_epochs"] = max(training["num_train_epochs"], math.ceil(FEW_STEPS / steps))
    section = {"data": sections.data(profile), "loss": loss, "training": training}
    return {"kto": section, **sections.evaluation(profile, verifier=False)}


def fits(rows: Sequence[Mapping[str, Any]], mapping: ColumnMapping) -> bool:
    """Thumbs both up and down; if all are up, the rows are demonstrations."""
    return len({str(Fields(row, mapping.columns).value("label")).lower() for row in rows}) > 1


METHOD = Method(
    KtoRecipe,
    compose,
    decides={
        "kto/data": "kto.data",
        "kto/reference-logps:order": "the order of the rows",
        "kto/reference-logps:mismatched": "kto.loss.loss_type",
        "kto/reference-logps": "kto.training",
        "kto": "kto",
    },
    init=Init(
        kinds=("unpaired",),
        sections=init_sections,
        why="answers with a thumb up or down each",
        rank=30,
        formats=("unpaired",),
        fits=fits,
    ),
)
