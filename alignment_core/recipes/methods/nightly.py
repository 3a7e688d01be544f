"""The method ``nightly``: a night of continued training on the rows that arrived since."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.method import Method
from alignment_core.recipes.methods.iterative_dpo import check_rounds
from alignment_core.recipes.paths import arriving
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.recipes.sections.evaluation import EvaluationConfig, PromotionConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.training import DpoConfig, RewardModelConfig


class NightlyConfig(Config):
    """Which rows a night takes, and the ledger in which it records them."""

    inbox: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name of the ledger; its nights are the history of the tag `nightly/<inbox>/nights`. Default: the recipe's name.
    Recipes with the same ledger share the rows: each row goes to one of them."""
    min_rows: int = Field(1, ge=1)
    """Minimum number of new rows; with fewer the night is empty, and they wait for the next one."""


class NightlyRecipe(BaseRecipe):
    """Production → the preference rows that arrived since → rounds → evaluation against production → promotion."""

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
        last = self.iterative_dpo is None and self.dpo.data.has_test_rows
        return (*super().measured_in_training, *(("test_margin", "test_accuracy", "test_loss") if last else ()))

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
        given = DataSource(path=source.path or "", format=source.format, columns=source.columns)
        if source.path is None or source != given:
            raise ValueError(
                f"`dpo.data.sources.{number}`: rows arrive in a file, folder, glob or `store:` prefix; give `path` and, "
                "if necessary, `format` and `columns`, and nothing else"
            )
    if data.test_rows >= min_rows:
        raise ValueError(
            f"`dpo.data.test_rows` ({data.test_rows}) must be less than `nightly.min_rows` ({min_rows}), or a small "
            "night leaves no row to train on"
        )


METHOD = Method(
    NightlyRecipe,
    composition="alignment.flows.nightly_stages:planned",
    run="alignment.flows.nightly:one_night",
    decides={"rows": "dpo.data"},
    cron="0 2 * * *",  # nights that overlap take rows of their own, and one of them promotes
)
