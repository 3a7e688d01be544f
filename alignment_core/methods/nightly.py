"""The method ``nightly``: a night of continued training on the rows that arrived since the last one."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from alignment_core.artifacts import Reference, Store
from alignment_core.composition import steps
from alignment_core.composition.base_model import reward_model
from alignment_core.composition.evaluations import PRODUCTION, Evaluations
from alignment_core.composition.graph import Input, artifact, current
from alignment_core.composition.plan import PlannedStage
from alignment_core.composition.results import Outputs
from alignment_core.data.overlap import FILE as PROMPTS
from alignment_core.errors import NotFound
from alignment_core.execution.base import StageConfig
from alignment_core.lineage import Graph
from alignment_core.methods.iterative_dpo import check_rounds, rounds
from alignment_core.models.same_tokenizer import check_same_template, check_same_tokenizer
from alignment_core.recipes.base import Config
from alignment_core.recipes.methods import Method
from alignment_core.recipes.paths import arriving, is_address
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.recipes.sections.evaluation import EvaluationConfig, PromotionConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.training import DpoConfig, RewardModelConfig
from alignment_core.stages.overlap import HELD_OUT


class NightlyConfig(Config):
    """Which rows a night takes, and the ledger in which it records them."""

    inbox: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name of the ledger; its nights are the history of the tag `nightly/<inbox>/nights`. Default: the recipe's name.
    Recipes with the same ledger share the rows: each row goes to one of them."""
    min_rows: int = Field(100, ge=1)
    """Minimum number of new rows; with fewer the night is empty, and they wait for the next one. The default is a
    few optimiser steps; raise it until `min_rows` / `dpo.training.batch_size` is 30 or more, or `align check` warns: fewer
    steps at the usual learning rates hardly change a pretrained model."""


class NightlyRecipe(BaseRecipe):
    """Production → the preference rows that arrived since → rounds → evaluation against production → promotion."""

    CONTINUES: ClassVar[bool] = True
    method: Literal["nightly"] = "nightly"
    """A night of continued training."""
    dpo: DpoConfig
    """Training on the new rows; `data` says where they arrive (`store:<prefix>` stands for the artifacts of every tag
    with this prefix)."""
    nightly: NightlyConfig = NightlyConfig()
    """Which rows a night takes."""
    reward_model: RewardModelConfig | None = None
    """The reward model, trained from `model` or existing; not needed if other rewards or a verifier rank the completions."""
    iterative_dpo: IterativeDpoConfig | None = None
    """Rounds after the training on new rows. Default: no rounds."""
    evaluation: EvaluationConfig
    """How the night's candidate and production are compared."""
    promotion: PromotionConfig
    """The tag of the production policy, and the gates that a candidate must pass. While the tag does not exist, nights
    start from `model`."""

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        measured = self.dpo.training.measured(self.dpo.data, "test_margin", "test_accuracy", "test_loss")
        return (*super().measured_in_training, *(measured if self.iterative_dpo is None else ()))

    @model_validator(mode="before")
    @classmethod
    def _rows_arrive_in_paths(cls, content: Any) -> Any:
        dpo = content.get("dpo") if isinstance(content, dict) else None
        if not isinstance(dpo, dict) or "data" not in dpo:
            return content
        return {**content, "dpo": {**dpo, "data": arriving(dpo["data"])}}

    @model_validator(mode="after")
    def _can_run_unattended(self) -> NightlyRecipe:
        _check_inbox(self.dpo.data, self.nightly.min_rows)
        check_rounds(self, self.reward_model, self.iterative_dpo)
        if not self.promotion.gates:
            raise ValueError(
                "`promotion.gates` needs at least one gate, because nobody reviews a model before it is promoted"
            )
        return self


def _check_inbox(data: DataConfig, min_rows: int) -> None:
    """Raise ValueError if rows cannot keep arriving in ``data``, or would leave nothing to train on."""
    for number, source in enumerate(data.sources):
        has_path = source.path is not None and not is_address(source.path)
        if not has_path or source != DataSource(path=source.path, format=source.format, columns=source.columns):
            raise ValueError(
                f"`dpo.data.sources.{number}`: rows arrive in a file, folder, glob or `store:` prefix; give `path` and, "
                "if necessary, `format` and `columns`, and nothing else"
            )
    if data.test_rows >= min_rows:
        raise ValueError(
            f"`dpo.data.test_rows` ({data.test_rows}) must be less than `nightly.min_rows` ({min_rows}), or a small "
            "night leaves no row to train on"
        )


def compose(recipe: NightlyRecipe) -> Outputs:
    """The stages of a night with new rows, as plans show them; :func:`alignment.flows.nightly.one_night` runs one."""
    rows = PlannedStage("the night's rows", "rows", StageConfig(), {}, "runs")
    return compose_night(recipe, current().store.tags.get(recipe.promotion.tag), rows, number=0)


def compose_night(recipe: NightlyRecipe, production: Reference | None, rows: Input | None, number: int) -> Outputs:
    """The stages of a night that continues from ``production`` on the batch ``rows``, after ``number`` other batches."""
    base = steps.base_model("model", recipe.model)  # its tokenizer prepares all data, so that the nights share prompts
    start = production or base
    if production and (model := artifact(base)):
        cure = "name a model with the tokenizer of production, such as the one that it descends from"
        what = "model: the policy to train further"
        check_same_tokenizer(current().store, model, production, what, cure)
        if recipe.dpo.data.chat_template is None:
            cure = (
                "name a model with production's, such as the one that it descends from, because rows are rendered in it"
            )
            check_same_template(current().store, model, production, what, cure)
    # From the model, not from production, so that it judges all nights alike.
    judge = reward_model(recipe.reward_model, base, base)

    pairs = steps.dataset("rows", recipe.dpo.data, "preferences", base, rows=rows)
    section, loss = recipe.iterative_dpo, recipe.dpo.loss
    policy: Input = steps.dpo("dpo", recipe.dpo.training, loss, start, pairs)
    if section is not None:
        prompts = steps.dataset("rounds/prompts", section.prompts, "prompts", base)
        before = number * section.rounds  # prompts continue where the last batch ended
        policies, _ = rounds(recipe, section, policy, prompts, judge, before)
        policy = policies[-1]

    evaluations = Evaluations(recipe, base, judge, origin=base, trained_before=_data_behind(start))
    baseline = PRODUCTION if production else "start"
    evaluations.add(baseline, start)
    evaluations.add("candidate", policy)
    report = evaluations.report()
    return Outputs(
        policy=policy, reward_model=judge, report=report, final="candidate", baseline=baseline, replaces=production
    )


def _data_behind(policy: Input) -> dict[str, Reference]:
    """Data sets that earlier runs trained ``policy`` on, by their short references.

    Left out are those without digests of prompts, such as pairs of sampled completions, whose prompts are a data set of their
    own, and those of a copied policy that were not copied with it.
    """
    if not isinstance(policy, Reference):
        return {}
    store = current().store
    with Graph.of(store) as graph:
        behind = {data for role, data in graph.ancestors(policy) if data.kind == "dataset" and role != HELD_OUT}
    return {data.short: data for data in sorted(behind) if _has_prompts(store, data)}


def _has_prompts(store: Store, data: Reference) -> bool:
    try:
        return any(file.path == PROMPTS for file in store.manifest(data).files)
    except NotFound:
        return False


METHOD = Method(
    NightlyRecipe,
    compose,
    run="alignment.flows.nightly:one_night",
    decides={"rows": "dpo.data"},
    cron="0 2 * * *",  # nights that overlap take rows of their own, and one of them promotes
)
