"""The recipes: one object says what to run, discriminated by ``method``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.paths import FolderPath, arriving
from alignment_core.recipes.sections.evaluation import EvaluationConfig, PromotionConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.nightly import NightlyConfig, check_inbox
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.retention import RetentionConfig
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.recipes.sections.rollout import IterativeDpoConfig
from alignment_core.recipes.sections.tracking import TrackingConfig
from alignment_core.recipes.sections.training import DpoConfig, RewardModelConfig, SftConfig


class BaseRecipe(Config):
    """What every recipe holds."""

    method: str
    """What to run."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name of the run in tables, logs and the Prefect UI."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Random seed, from which all others are derived."""
    model: ModelConfig
    """The model to start from."""
    evaluation: EvaluationConfig | None = None
    """How the policy is evaluated. Default: no evaluation."""
    promotion: PromotionConfig | None = None
    """Which tag to move, and the gates that must pass. Default: no promotion."""
    store: FolderPath | None = None
    """Folder or URI of the artifact store. Default: `$ALIGN_HOME/store`."""
    resources: ResourcesConfig = ResourcesConfig()
    """Placement, memory and deadlines; not part of any stage's key. With few exceptions (docs/design.md, Determinism)
    they change a result by rounding at most."""
    retention: RetentionConfig = RetentionConfig()
    """What is dropped at the end of the run."""
    tracking: TrackingConfig = TrackingConfig()
    """W&B and TensorBoard; they never change a result."""

    @property
    def samples(self) -> bool:
        """Whether a stage samples completions."""
        return self.evaluation is not None

    @model_validator(mode="after")
    def _gates_have_metrics(self) -> BaseRecipe:
        if self.promotion and self.promotion.gates and self.evaluation is None:
            raise ValueError("`promotion.gates` need an `evaluation` that measures their metrics")
        return self


class SftRecipe(BaseRecipe):
    """Supervised fine-tuning."""

    method: Literal["sft"] = "sft"
    """Supervised fine-tuning."""
    sft: SftConfig
    """Demonstrations and training."""


class RewardModelRecipe(BaseRecipe):
    """A reward model from preference pairs."""

    method: Literal["reward-model"] = "reward-model"
    """Reward-model training."""
    reward_model: RewardModelConfig
    """Pairs and training."""

    @model_validator(mode="after")
    def _needs_pairs(self) -> RewardModelRecipe:
        if self.reward_model.data is None or self.reward_model.model is not None:
            raise ValueError(
                "`reward_model.data` is needed here, and `reward_model.model` is not: this recipe trains one"
            )
        if self.evaluation or self.promotion:
            raise ValueError(
                "a reward model is judged on its held-out pairs (`test_rows`): remove `evaluation`, `promotion`"
            )
        return self


class DpoRecipe(BaseRecipe):
    """DPO, IPO or cDPO on a fixed set of pairs."""

    method: Literal["dpo"] = "dpo"
    """Direct preference optimisation on given pairs."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first."""
    dpo: DpoConfig
    """Pairs and training."""


class IterativeDpoRecipe(BaseRecipe):
    """SFT → reward model → rounds of generate, score, select, train → evaluation → promotion."""

    method: Literal["iterative-dpo"] = "iterative-dpo"
    """Iterative DPO."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model; may be left out when `iterative_dpo.selection.score` is `verifier`."""
    iterative_dpo: IterativeDpoConfig
    """The rounds."""

    @property
    def samples(self) -> bool:
        """Every round does."""
        return True

    @model_validator(mode="after")
    def _has_a_judge(self) -> IterativeDpoRecipe:
        _check_judge(self.reward_model, self.iterative_dpo, self.evaluation)
        return self


class RlRecipe(BaseRecipe):
    """SFT → steps of sample, reward, train → evaluation → promotion."""

    method: Literal["rl"] = "rl"
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO and their relatives."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model that `rl.rewards` refers to as `ours`; a critic is initialised from it, too."""
    rl: RlConfig
    """The steps."""

    @property
    def samples(self) -> bool:
        """Every step does."""
        return True

    @model_validator(mode="after")
    def _has_its_rewards(self) -> RlRecipe:
        _check_judge(self.reward_model, None, None)
        ours = any(reward.reward_model == "ours" for reward in self.rl.rewards)
        if ours and self.reward_model is None:
            raise ValueError("`rl.rewards` asks for the reward model `ours`: add a section `reward_model`")
        if self.reward_model and not ours:
            raise ValueError("nothing uses `reward_model`: add `{reward_model: ours}` to `rl.rewards`, or remove it")
        for reward in self.rl.rewards:
            asked = {"rl.prompts": self.rl.prompts} | (
                {"rl.best.prompts": self.rl.best.prompts} if self.rl.best else {}
            )
            for where, prompts in asked.items() if reward.verifier == "task" else ():
                other = next((source.origin for source in prompts.sources if source.task is None), None)
                if other is not None:
                    raise ValueError(
                        f"`verifier: task` scores the built-in tasks alone, and {other} of `{where}` is none"
                    )
        return self


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
    """The reward model, trained from `model` or given; optional if a verifier judges."""
    iterative_dpo: IterativeDpoConfig | None = None
    """Rounds after the training on new rows. Default: no rounds."""
    evaluation: EvaluationConfig
    """How the night's candidate and production are compared."""
    promotion: PromotionConfig
    """The tag of the production policy, and the gates that a candidate must pass. While the tag does not exist, nights
    start from `model`."""

    @model_validator(mode="before")
    @classmethod
    def _rows_arrive_in_paths(cls, content: Any) -> Any:
        dpo = content.get("dpo") if isinstance(content, dict) else None
        if not isinstance(dpo, dict) or "data" not in dpo:
            return content
        return {**content, "dpo": {**dpo, "data": arriving(dpo["data"])}}

    @model_validator(mode="after")
    def _can_run_unattended(self) -> NightlyRecipe:
        check_inbox(self.dpo.data, self.nightly.min_rows)
        _check_judge(self.reward_model, self.iterative_dpo, self.evaluation)
        if not self.promotion.gates:
            raise ValueError("`promotion.gates` needs at least one gate: nobody looks at a model before it is promoted")
        return self


def _check_judge(
    reward_model: RewardModelConfig | None, rounds: IterativeDpoConfig | None, evaluation: EvaluationConfig | None
) -> None:
    """Raise ValueError unless there is something that ranks the completions of the rounds."""
    if reward_model and (reward_model.model is None) == (reward_model.data is None):
        raise ValueError(
            "`reward_model` needs exactly one of `data` (train one) and `model` (use that one), as in --set "
            "'reward_model={model: NAME}'"
        )
    if rounds is None:
        return
    if reward_model is None and rounds.selection.score == "reward":
        raise ValueError("`reward_model` is needed, because `iterative_dpo.selection.score` is `reward`")
    if rounds.selection.score == "verifier" and not (evaluation and evaluation.verifier):
        raise ValueError("`evaluation.verifier` is needed, because `iterative_dpo.selection.score` is `verifier`")
    if rounds.selection.score == "verifier" and evaluation:
        evaluation.check_verifier(rounds.prompts, "iterative_dpo.prompts")


Recipe = Annotated[
    SftRecipe | RewardModelRecipe | DpoRecipe | IterativeDpoRecipe | RlRecipe | NightlyRecipe,
    Field(discriminator="method"),
]

BY_METHOD: dict[str, type[BaseRecipe]] = {
    "sft": SftRecipe,
    "reward-model": RewardModelRecipe,
    "dpo": DpoRecipe,
    "iterative-dpo": IterativeDpoRecipe,
    "rl": RlRecipe,
    "nightly": NightlyRecipe,
}
