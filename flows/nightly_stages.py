"""The stages of a night, once it is known what production is and which rows it trains on. Imports no Prefect."""

from __future__ import annotations

from alignment.flows.base_model_stages import reward_model
from alignment.flows.evaluation import PRODUCTION, Evaluations
from alignment.flows.iterative_dpo import rounds
from alignment.flows.results import Outputs
from alignment.tasks import data, training
from alignment.tasks.graph import CURRENT, Input, artifact
from alignment_core.artifacts import Reference
from alignment_core.checks.plan import PlannedStage
from alignment_core.execution.base import StageConfig
from alignment_core.models.same_tokenizer import check_same_tokenizer
from alignment_core.recipes.methods.nightly import NightlyRecipe


def planned(recipe: NightlyRecipe) -> Outputs:
    """The stages of a night that finds rows, for who wants to see them before."""
    arriving = PlannedStage("the night's rows", "rows", StageConfig(), {}, "runs")
    return compose(recipe, CURRENT.get().store.tags.get(recipe.promotion.tag), arriving, number=0)


def compose(recipe: NightlyRecipe, production: Reference | None, rows: Input | None, number: int) -> Outputs:
    """The stages of a night: ``rows`` is the batch that it took, after ``number`` others."""
    base = data.base_model("model", recipe.model)  # its tokenizer prepares all data, so that the nights share prompts
    start = production or base
    if production and (made := artifact(base)):
        cure = "name a model with the tokenizer of production, such as the one that it descends from"
        check_same_tokenizer(CURRENT.get().store, made, production, "model: the policy to train further", cure)
    judge = reward_model(
        recipe, recipe.reward_model, base, base
    )  # from the model, not from production: it judges all nights alike

    pairs = data.dataset("rows", recipe.dpo.data, "preferences", base, rows=rows)
    section, loss = recipe.iterative_dpo, recipe.dpo.loss
    policy: Input = training.dpo("dpo", recipe.dpo.training, loss, start, pairs)
    if section is not None:
        prompts = data.dataset("rounds/prompts", section.prompts, "prompts", base)
        before = number * section.rounds  # prompts go on where the last batch ended
        policies, _ = rounds(recipe, section, policy, prompts, judge, before)
        policy = policies[-1]

    evaluations = Evaluations(recipe, base, judge)
    baseline = PRODUCTION if production else "start"
    evaluations.add(baseline, start)
    evaluations.add("candidate", policy)
    report = evaluations.report()
    return Outputs(
        policy=policy, reward_model=judge, report=report, final="candidate", baseline=baseline, replaces=production
    )
