"""The fields of every recipe; methods add their own sections, see :mod:`alignment_core.recipes.methods`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, ValidationInfo, model_validator

from alignment_core.recipes import precision
from alignment_core.recipes.base import Config, refuses_unused
from alignment_core.recipes.paths import FolderPath
from alignment_core.recipes.sections.evaluation import OF_SAMPLES, EvaluationConfig, PromotionConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.retention import RetentionConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.tracking import TrackingConfig


class BaseRecipe(Config):
    """The fields of every recipe."""

    SAMPLES: ClassVar[bool] = False
    """Whether a stage samples completions even without an evaluation."""
    CONTINUES: ClassVar[bool] = False
    """Whether a run continues from the policy of an earlier one that started from `model`."""

    method: str
    """Method of the run."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name of the run in tables, logs and the Prefect UI."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed; all others are derived from it."""
    model: ModelConfig
    """The model to start from."""
    evaluation: EvaluationConfig | None = None
    """Evaluation of the policy. Default: none."""
    promotion: PromotionConfig | None = None
    """Tag to move to the policy, and gates that must pass. Default: no promotion."""
    store: FolderPath | None = None
    """Artifact store: a folder, `s3://bucket/prefix` or `hf://organisation/name`. Default: `$ALIGN_STORE`, the store that
    `align store use` has set, or `$ALIGN_HOME/store`."""
    reuse_across_versions: tuple[str, ...] = ()
    """Packages, such as `[torch, vllm]`, whose version does not matter for cached results. Default: a stage runs again after an
    upgrade of a package that computes its result."""
    resources: ResourcesConfig = ResourcesConfig()
    """Placement, memory and deadlines; not part of any stage's key. With few exceptions (docs/design.md, Determinism)
    they change a result by rounding at most."""
    retention: RetentionConfig = RetentionConfig()
    """Deletion of old data when the run ends."""
    tracking: TrackingConfig = TrackingConfig()
    """W&B and TensorBoard; they never change a result."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill_precision(cls, content: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill the default of `bf16`, which depends on `resources.device`; it does not count as set."""
        if not isinstance(content, dict) or not precision.on_gpus(content):
            return handler(content)
        filled = precision.in_bf16(cls, content)
        recipe = handler(filled)
        precision.unset(recipe, content, filled)
        return recipe

    @property
    def samples(self) -> bool:
        """Whether a stage samples completions."""
        return self.SAMPLES or self.evaluation is not None

    @property
    def has_reward_model(self) -> bool:
        """Whether the recipe has a section `reward_model`."""
        return getattr(self, "reward_model", None) is not None

    @property
    def measured_in_training(self) -> tuple[str, ...]:
        """Metrics for gates that trainings measure on held-out rows, including the training of an existing reward model, and
        ``<name>.first`` for those that are known before the first step, too."""
        judge = getattr(self, "reward_model", None)
        if judge is None or (judge.data is not None and not judge.data.has_test_rows):
            return ()
        return ("reward_model_accuracy",)

    def check_ours(self, rewards: Sequence[RewardConfig], field: str) -> None:
        """Raise ValueError if the rewards at ``field`` refer to a reward model that the recipe does not have."""
        for section in {reward.KEY: None for reward in rewards if reward.model == "ours"}:
            if getattr(self, section, None) is None:
                lacks = section not in type(self).model_fields
                cure = f"`method: {self.method}` has none, so name a model" if lacks else f"add a section `{section}`"
                raise ValueError(f"`{field}` refers to the {section.replace('_', ' ')} `ours`: {cure}")

    def check_used(self, rewards: Sequence[RewardConfig], field: str) -> None:
        """Raise ValueError if the recipe has a section `reward_model` that neither the rewards at ``field`` nor the evaluation
        use. An evaluation without rewards uses it by default."""
        evaluation = self.evaluation
        if not self.has_reward_model or (evaluation and not evaluation.rewards):
            return
        listed = (*rewards, *(evaluation.rewards if evaluation else ()))
        if all(reward.model != "ours" or reward.KEY != "reward_model" for reward in listed):
            raise ValueError(f"nothing uses `reward_model`: add `{{reward_model: ours}}` to `{field}`, or remove it")

    @model_validator(mode="after")
    def _trusts_code_by_model(self, info: ValidationInfo) -> BaseRecipe:
        for field, model in _models(self) if refuses_unused(info.context) and not self.model.trust_remote_code else ():
            if model.trust_remote_code:
                raise ValueError(
                    f"`{field}.trust_remote_code` has no effect without `model.trust_remote_code`, which decides for all "
                    "models of the recipe: set that one"
                )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> BaseRecipe:
        if self.evaluation:
            self.check_ours(self.evaluation.rewards, "evaluation.rewards")
        gates = self.promotion.gates if self.promotion else ()
        if self.evaluation is None and not all(gate.is_of_training for gate in gates):
            raise ValueError("`promotion.gates` need an `evaluation` that measures their metrics")
        for number, gate in enumerate(gates):
            measured = self.measured_in_training if gate.is_of_training else ()
            if gate.is_of_training and gate.metric not in measured:
                known = ", ".join(name for name in measured if not name.endswith(".first")) or "none"
                raise ValueError(
                    f"`promotion.gates.{number}`: no training of this recipe measures {gate.metric!r} on held-out rows "
                    f"(measured: {known}): hold rows out with `test_rows`, or use a metric of the evaluation"
                )
            if gate.is_of_training and gate.min_gain is not None and f"{gate.metric}.first" not in measured:
                raise ValueError(
                    f"`promotion.gates.{number}.min_gain`: the training has `eval_on_start: false`, so {gate.metric!r} is not "
                    "known before its first step: leave that out, or give a `min` or a `max`"
                )
            if self.evaluation and not gate.is_of_training and not self._measures(self.evaluation, gate.measures):
                if gate.measures == "kl_to_model" and not self.CONTINUES:
                    raise ValueError(f"`promotion.gates.{number}`: `kl_to_model` is measured in nights: use `kl` here")
                if gate.measures in OF_SAMPLES:
                    raise ValueError(f"`promotion.gates.{number}`: {needs_samples(gate.measures)}")
                given_by = GIVEN_BY[re.sub(r"[@/].*|\d+$", "", gate.measures)]
                raise ValueError(f"`promotion.gates.{number}`: nothing measures {gate.metric!r}: add {given_by}")
        return self

    def _measures(self, evaluation: EvaluationConfig, metric: str) -> bool:
        reward = bool(evaluation.rewards) or self.has_reward_model
        verified = evaluation.verifier is not None
        if metric.startswith("pass@"):
            return int(metric.removeprefix("pass@")) in evaluation.pass_at
        if metric.startswith("lm_eval/"):
            return evaluation.lm_eval is not None
        if metric.startswith("reward_"):
            return int(metric.removeprefix("reward_")) < len(evaluation.rewards) > 1
        if metric in OF_SAMPLES:
            return evaluation.generation.samples_all_tokens and (metric != "kl_to_model" or self.CONTINUES)
        given = {"accuracy": verified, "reward": reward, "win_rate": reward or verified}
        return {**given, "judged_win_rate": evaluation.judge is not None}.get(metric, True)


def _models(section: Any, path: str = "") -> Iterator[tuple[str, ModelConfig]]:
    """The models in a section of a recipe, with the paths of their fields."""
    if isinstance(section, ModelConfig):
        yield path, section
    elif isinstance(section, BaseModel | Mapping | tuple):
        named: Iterable[tuple[Any, Any]] = enumerate(section) if isinstance(section, tuple) else dict(section).items()
        for name, value in named:
            yield from _models(value, f"{path}.{name}" if path else str(name))


def needs_samples(metric: str) -> str:
    """A sentence about a metric of ``OF_SAMPLES`` that the evaluation does not measure."""
    return (
        f"`{metric}` is estimated from samples of the unmodified policy: give `evaluation.generation` a `temperature` above 0 "
        "and leave out `top_p`, `top_k` and `min_p`, or use another metric"
    )


GIVEN_BY = {
    "accuracy": "`evaluation.verifier`",
    "reward": "`evaluation.rewards`",
    "win_rate": "`evaluation.rewards` or `evaluation.verifier`",
    "judged_win_rate": "`evaluation.judge`",
    "lm_eval": "`evaluation.lm_eval`",
    "pass": "`evaluation.pass_at`",
    "reward_": "further `evaluation.rewards`, of which the first is 0",
}
"""The fields that add metrics to an evaluation."""
