"""Where the methods that improve a policy begin: the base model, fine-tuned on demonstrations if the recipe says so."""

from __future__ import annotations

from alignment_core.recipes import DpoRecipe, IterativeDpoRecipe, RlRecipe
from tasks import data, training
from tasks.stage import Input


def base_and_start(recipe: DpoRecipe | IterativeDpoRecipe | RlRecipe) -> tuple[Input, Input]:
    """The base model, whose tokenizer prepares all data, and the policy that the method starts from."""
    trust = recipe.model.trust_remote_code
    base = data.base_model("model", recipe.model)
    if recipe.sft is None:
        return base, base
    demonstrations = data.dataset("sft/data", recipe.sft.data, "sft", base, trust)
    return base, training.sft("sft", recipe.sft.training, base, demonstrations, trust)
