"""Completions of the start → their attributes → SFT with these in the prompts → evaluation with the wanted values."""

from __future__ import annotations

from alignment.flows.base_model_stages import base_and_start, reward_model, rewards
from alignment.flows.evaluation import STREAM, Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, rollout, training
from alignment.tasks.graph import submit
from alignment_core.recipes.methods.conditional_sft import ConditionalSftRecipe
from alignment_core.stages.attributes import AttributesConfig


def conditional_sft(recipe: ConditionalSftRecipe) -> Outputs:
    """Compose the whole recipe."""
    section = recipe.conditional_sft
    base, start = base_and_start(recipe, recipe.sft)
    judge = reward_model(recipe, recipe.reward_model, base, start)
    prompts = data.dataset("conditional-sft/prompts", section.prompts, "prompts", base)
    listed = [one.reward for one in section.attributes.values()]
    measured_by = rewards("conditional_sft.attributes", listed, judge, "conditional-sft")
    samples = rollout.generate("conditional-sft/sample", section.generation, start, prompts)
    scores = rollout.score("conditional-sft/judge", samples, start, measured_by)
    config = AttributesConfig(attributes=section.attributes)
    rows = submit("attributes", "conditional-sft/attributes", config, {"rollouts": samples, "scores": scores})
    labelled = section.prompts.model_copy(update={"prompt_template": section.prompt_template})
    demonstrations = data.dataset("conditional-sft/data", labelled, "demonstrations", base, rows=rows)
    policy = training.sft("conditional-sft", section.training, start, demonstrations)

    evaluations = Evaluations(recipe, base, judge)
    before = "sft" if recipe.sft else "start"
    if recipe.evaluation:
        evaluations.add(before, start)
        for number, values in enumerate(section.wanted, start=1):
            label = "wanted" if number == 1 else f"wanted-{number}"
            template = section.wanted_template(values)
            asked = recipe.evaluation.prompts.model_copy(update={"prompt_template": template})
            conditions = data.dataset(
                f"{label}/evaluation/prompts", asked, "prompts", base, stream=STREAM, held_out=True
            )
            evaluations.add(label, policy, prompts=conditions)
    return Outputs(
        policy=policy,
        reward_model=judge,
        report=evaluations.report(),
        final="wanted",
        baseline=before,
        evaluations=evaluations,
    )
