"""Reinforcement learning: sampling, rewards, advantages, policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from alignment_core.recipes.base import Config, refuses_unused, unkeyed
from alignment_core.recipes.paths import CodePath, code_path, plain, with_numbers
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.model import ModelConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.recipes.sections.rewards import Reward
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.recipes.sections.training import ADAM, EVALUATION_FIELDS, TrainingConfig
from alignment_core.source_code import PACKAGE

REWARDS_FIELD = "rl.rewards"
"""The field of :attr:`RlConfig.rewards` in a recipe, as errors name it."""
LEARNED = ("reward_model", "process_reward_model")
"""Keys of rewards by models that were trained to judge."""
MOST_LEARNED = (-10.0, 10.0)
"""Bounds of a reward model's score for a critic: OpenRLHF 0.11's `--reward.clip_range`."""
OF_ROUNDING = {"mode": "mask", "level": "sequence", "high": 3.0}
"""Correction of bf16's rounding: TRL 1.16's `sequence_mask`."""
OF_STALE = {"mode": "clip"}
"""Correction with `max_staleness`, where the product of many ratios is rarely near 1: truncated importance sampling."""
MOST_ADAPTED = 0.2
"""Most that the adaptive KL controller changes the coefficient in ``horizon`` completions: Ziegler et al. 2019."""
DEPENDENT = ("rl.kl.coefficient", "rl.advantage.gae_lambda", "rl.importance_sampling_correction.mode")
"""Fields whose default depends on other sections of `rl`."""


def _functions(value: Any) -> Any:
    return [code_path(item) for item in value] if isinstance(value, list) else code_path(value)


def _given(section: Any, name: str) -> Any:
    """A field of a section as in a recipe, or of one that was made in Python; None if it is not set."""
    if isinstance(section, Config):
        return getattr(section, name) if name in section.model_fields_set else None
    return section.get(name) if isinstance(section, Mapping) else None


def _is_unscaled(reward: Any) -> bool:
    """Whether it is a reward model's score in the model's own units, or in deviations of its training answers."""
    return bool(_given(reward, "reward_model")) and _given(reward, "normalise") in (None, "none", "model")


class EnvironmentConfig(Config):
    """Environment class or agent that responds to the policy between its turns. Each completion has its own instance, in
    another process."""

    name: CodePath | None = None
    """Environment class, `module:Class` or `file.py:Class`. `reset(prompt, label)` returns text to append to the prompt, or
    None; `step(completion)` returns a dict with `observation` (a text, or a list of texts, one message each), `reward` and
    `done`. With `images: true`, a list of parts may stand for a text, and some of them be images. Both may be `async`;
    `close()` is called at the end if it exists. `alignment_core.environments.tools:Tools` runs tools."""
    agent: CodePath | None = unkeyed(None)
    """Agent function, `module:function` or `file.py:function`, optionally `async`: `agent(prompt, label, base_url,
    api_key)` queries the policy by `POST {base_url}/chat/completions`, as with OpenAI's API, and returns the episode's
    reward."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class, or additional ones of the agent. `env:NAME` stands for the value of an environment
    variable, for secrets."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of the policy's turns in an episode."""
    episode_seconds: float = Field(600.0, gt=0)
    """Maximum time in seconds that the environment or agent may take for an episode, all its calls together; sampling does
    not count. Longer episodes have no reward."""
    role: Literal["user", "tool"] = "user"
    """Role of a class's observations in the chat template; without a template they are appended as plain text."""
    skip_special_tokens: bool = unkeyed(True)
    """Remove special tokens, except tags of tool calls and of reasoning such as `<think>`, from the text of the policy's turns
    that the environment gets. The end-of-turn token is always removed."""

    images: bool = unkeyed(False)
    """Observations and requests of agents may have images, as parts of the type `image` or `image_url`. Needs an image-text
    model; rows then share no prefixes in training."""

    @field_validator("options")
    @classmethod
    def _functions_of_ours(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """In options of our own environments, `file.py:function` is a path; the meaning of other environments' options is
        unknown."""
        is_own = (info.data.get("name") or "").startswith(f"{PACKAGE}.")
        return plain({name: _functions(value) for name, value in options.items()} if is_own else options)

    @model_validator(mode="after")
    def _is_one_thing(self) -> EnvironmentConfig:
        if (self.name is None) == (self.agent is None):
            raise ValueError("give exactly one of `name` (a class) and `agent` (a function)")
        return self


class ShapingConfig(Config):
    """Length penalties that are subtracted from the reward. With an environment, the length is that of the whole response,
    turns and observations, as in `max_completion_length`."""

    overlong_buffer: int = Field(0, ge=0)
    """Soft overlong punishment (DAPO): number of tokens before `max_completion_length` over which the penalty grows
    linearly to `overlong_penalty`."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Penalty of a completion of maximum length."""
    truncation_penalty: float = Field(0.0, ge=0)
    """Penalty of a completion that was truncated at `max_completion_length`, or whose next observation did not fit."""

    @model_validator(mode="after")
    def _has_a_buffer(self, info: ValidationInfo) -> ShapingConfig:
        if not self.overlong_buffer:
            self.refuse_unused(info, ("overlong_penalty",), "without `overlong_buffer`")
        return self


class FilterConfig(Config):
    """Dynamic sampling (DAPO): prompts whose completions all have the same reward have no gradient, and are replaced.
    Rewards are compared after clipping and weighting, before normalisation and shaping."""

    low: float | None = None
    """Also replace prompts with a mean reward of at most this value. The bounds are meant for rewards in [0, 1], such as a
    verifier's: `low: 0.1` excludes prompts that are too hard. Default: no bound."""
    high: float | None = None
    """Also replace prompts with a mean reward of at least this value. Default: no bound."""
    max_refills: int = Field(3, ge=0)
    """Maximum number of times that a step samples replacements; a step that still lacks prompts trains on fewer."""

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> FilterConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"`low` {self.low:g} is not below `high` {self.high:g}, so that no prompt would be kept")
        return self


class AdvantageConfig(Config):
    """Advantage estimation."""

    RENAMED: ClassVar = {"divide_by_deviation": "scale_rewards"}

    estimator: Literal["gae", "returns", "group", "leave-one-out", "batch"] = "group"
    """`gae` is generalized advantage estimation and needs a critic. The others are the return of a token minus a
    baseline: none (`returns`, REINFORCE++), the mean of the prompt's completions (`group`: REINFORCE++-baseline, GRPO,
    Dr. GRPO), the mean of the other completions (`leave-one-out`, RLOO), or the mean of the batch (`batch`)."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide by the standard deviation of rewards: of the prompt's completions (`group`, GRPO), or of all completions of the
    step (`batch`: Liu et al. 2025, "Tricks or Traps?"). TRL's default is `group`; `none` is Dr. GRPO's, as the division gives
    prompts with almost equal rewards a greater weight. With the estimators `group` and `leave-one-out`, and `batch` with
    `batch`: rewards that keep a mean would be divided by almost zero where they are equal."""
    whiten: Literal["none", "mean", "mean-and-deviation"] = "none"
    """Subtract the mean of the advantages over the whole batch, and optionally divide by their standard deviation."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor γ, per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalized advantage estimation. Default with a reward model: 0.95 (Schulman et al. 2017; Ziegler et al. 2019), as
    the critic starts from it; with other rewards: 1 (OpenRLHF 0.11; Hu et al. 2025, Open-Reasoner-Zero), because a reward at
    the last of 512 tokens would reach the first one as 0.95⁵¹¹, and a new critic has nothing to add yet."""

    @classmethod
    def of_old_names(cls, old: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
        """The switch as a choice."""
        divides = old["divide_by_deviation"]
        return {"scale_rewards": {True: "group", False: "none"}[divides] if isinstance(divides, bool) else divides}

    @model_validator(mode="after")
    def _scales_rewards_without_a_mean(self, info: ValidationInfo) -> AdvantageConfig:
        """Stored recipes pass."""
        without_mean = self.estimator in ("group", "leave-one-out") or self.estimator == self.scale_rewards
        if self.scale_rewards != "none" and not without_mean and refuses_unused(info.context):
            raise ValueError(
                f"`scale_rewards: {self.scale_rewards}` divides by the deviation of rewards, from which `estimator: "
                f"{self.estimator}` does not subtract their mean: equal rewards of 1 would become 10,000. Use the estimator "
                "`group` or `leave-one-out`, or `normalise` of the reward"
            )
        return self

    @model_validator(mode="after")
    def _has_a_lambda(self, info: ValidationInfo) -> AdvantageConfig:
        if self.estimator != "gae":
            self.refuse_unused(info, ("gae_lambda",), f"with `estimator: {self.estimator}`")
        return self


class PolicyLossConfig(Config):
    """Policy loss."""

    RENAMED: ClassVar = {
        "clip_low": "epsilon",
        "clip_high": "epsilon_high",
        "dual_clip": "delta",
        "entropy_bonus": "entropy_coef",
    }
    DEFAULTS_BY: ClassVar = {
        "loss_type": {
            "gspo": {"epsilon": 3e-4, "epsilon_high": 4e-4},  # Zheng et al. 2025, section 5.1
            "cispo": {"epsilon": 1.0, "epsilon_high": 5.0},  # TRL's docs; Khatri et al. 2025, appendix A.17
        }
    }

    loss_type: Literal["clip", "gspo", "cispo", "sapo"] = "clip"
    """Clipped ratio (`clip`, PPO), clipped ratio of the sequence (`gspo`), CISPO, or SAPO."""
    epsilon: float = Field(0.2, ge=0, le=1)
    """Lower clip bound ε: the ratio is clipped below 1 − ε. 0.2 as in PPO's paper, TRL and OpenRLHF. Default with `gspo`: 3e-4,
    because the ratio of a sequence is the geometric mean of its tokens' ratios; with `cispo`: 1, no lower bound."""
    epsilon_high: float | None = Field(None, ge=0)
    """Upper clip bound ε: the ratio is clipped above 1 + ε; DAPO's clip-higher is 0.28. Default: `epsilon`; with `gspo` 4e-4.
    With `cispo` it is the maximum weight of a token itself, as in TRL, and the default is 5, beside which 4 and 8 did as well
    (Khatri et al. 2025, ScaleRL)."""
    delta: float | None = Field(None, gt=1)
    """Dual clip: upper bound of the ratio if the advantage is negative, above 1 + `epsilon_high`. Default: no dual clipping."""
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """SAPO's temperatures τ for positive and for other advantages."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "fixed-length"] = "token-mean"
    """Average of the token losses: over all tokens, within each completion and then over completions, or divided by the maximum
    completion length (Dr. GRPO)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus (nats per token), which is subtracted from the loss."""
    mask_truncated_completions: bool = unkeyed(False)
    """Train on no token of a completion that was truncated at `max_completion_length`, or whose next observation did not fit
    (DAPO's overlong filtering; TRL's field of this name). Its reward still counts in the mean and deviation of its group, and
    its sequence in the averages over sequences; `token-mean` divides by the tokens that are trained on."""

    top_entropy_quantile: float = unkeyed(1.0, gt=0, le=1)
    """Fraction of a step's tokens with the highest entropies that the policy loss trains (Wang et al. 2025, "Beyond the 80/20
    Rule", which advises 0.2). The KL keeps all tokens, and the average is over all, as in TRL; so does the entropy bonus, which
    TRL gives to these tokens alone. It takes a forward pass before the update. Default: all tokens."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound of the ratio."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return 1 - self.epsilon, high if self.loss_type == "cispo" else 1 + high

    @classmethod
    def of_old_names(cls, old: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
        """`clip_high` counted from 1 with `cispo`, too, and was 0.2 if only `clip_low` was set."""
        fields = super().of_old_names(old, section)
        loss_type = section.get("loss_type", "clip")
        high = with_numbers(old.get("clip_high"))
        if loss_type == "cispo" and isinstance(high, int | float):
            fields["epsilon_high"] = 1 + high
        elif loss_type == "clip" and "clip_low" in old and "epsilon_high" not in section:
            fields.setdefault("epsilon_high", 0.2)
        return fields

    @model_validator(mode="after")
    def _reads_its_fields(self, info: ValidationInfo) -> PolicyLossConfig:
        unread = {"sapo": ("epsilon", "epsilon_high", "delta"), "cispo": ("delta", "sapo_temperatures")}
        names = unread.get(self.loss_type, ("sapo_temperatures",))
        self.refuse_unused(info, names, f"with `loss_type: {self.loss_type}`")
        low, high = self.bounds
        if low > high:
            raise ValueError(
                f"`epsilon_high` {high:g} is the maximum weight of a token with `loss_type: cispo`, below the minimum "
                f"1 − `epsilon` = {low:g}: raise it; its default is 5"
            )
        return self


class KlConfig(Config):
    """KL penalty to a reference, by default the initial policy. With a coefficient of 0 no reference model is loaded."""

    RENAMED: ClassVar = {"refresh_every": "sync_ref_model"}
    DEFAULTS_BY: ClassVar = {"place": {"reward": {"estimator": "k1"}}}

    coefficient: float = Field(0.0, ge=0)
    """KL coefficient, for the KL in nats per token. Default with a reward model: 0.04 (Shao et al. 2024, DeepSeekMath, section
    4.2; usual are 0.01 in OpenRLHF to 0.05 in PPO of TRL 1.12), because the policy drifts to whatever it overrates; with other
    rewards: 0 (TRL 1.16's GRPO; Yu et al. 2025, DAPO)."""
    place: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the reward of each token."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator: Schulman's k1, k2 or k3. Default with `place: reward`: k1, as in OpenRLHF. As rewards, k2 and k3 are
    penalties on both sides of the reference, so that they also drive down tokens that the policy already makes too rare."""
    unbiased_gradient: bool = False
    """With the KL in the loss: keep the estimator's value, but use the unbiased gradient of the KL (k2's gradient)."""
    target: float | None = Field(None, gt=0)
    """Target of the adaptive KL controller: mean KL per token. Default: the coefficient is fixed."""
    horizon: int = Field(10000, ge=1)
    """Horizon of the adaptive KL controller, in completions."""
    reference: ModelConfig | None = unkeyed(None)
    """Reference model, with the policy's tokenizer. Default: the initial policy of this stage."""
    sync_ref_model: ReferenceSyncConfig | None = unkeyed(None)
    """Update the reference during training. Default: the reference is fixed."""

    @classmethod
    def of_old_names(cls, old: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
        """`refresh_every` replaced the reference by the policy."""
        every = old["refresh_every"]
        return {"sync_ref_model": None if every is None else {"mixup_alpha": 1.0, "sync_steps": every}}


class ImportanceSamplingConfig(Config):
    """Correction of the mismatch between the sampling policy (vLLM) and the trained policy."""

    RENAMED: ClassVar = {"correction": "mode"}

    mode: Literal["none", "clip", "mask"] = "none"
    """Weight each token by its importance ratio; outside the bounds, clip the ratio (`clip`) or set it to 0 (`mask`). Default
    with `training.bf16`, in which the engine's log-probabilities differ by up to 0.01: `mask` at the level `sequence` with
    `high: 3`, as in TRL 1.16; with `max_staleness`, too: `clip` (Yao et al. 2025, truncated importance sampling)."""
    level: Literal["token", "sequence"] = "token"
    """Level at which the bounds apply: the token, or the whole completion."""
    measure: Literal["ratio", "kl", "tv"] = "ratio"
    """Measure to which the bounds apply: the ratio of the two probabilities, or the binary KL or total variation of the
    sampled token."""
    low: float = Field(0.0, ge=0)
    """Lower bound of the ratio, at most 1."""
    high: float = Field(2.0, gt=0)
    """Upper bound of the ratio, at least 1; of the KL in nats; or of the total variation, below 1. The default is for ratios
    alone."""
    stop_above: float = Field(0.1, gt=0)
    """Stop the run if a step's mean mismatch, in nats per token, exceeds this value: the engine's weights then differ from the
    policy's."""

    @model_validator(mode="after")
    def _bounds_its_measure(self, info: ValidationInfo) -> ImportanceSamplingConfig:
        """Stored recipes pass."""
        if self.mode == "none":
            names = ("level", "measure", "low", "high")
            self.refuse_unused(info, names, "with `mode: none`", "set `mode: clip` or `mode: mask`, or leave it out")
        elif self.measure != "ratio":
            self.refuse_unused(info, ("low",), f"with `measure: {self.measure}`, which is at least 0")
        if self.mode == "none" or not refuses_unused(info.context):
            return self
        if self.measure == "ratio" and not (self.low <= 1 <= self.high and self.low < self.high):
            raise ValueError(
                f"`low` {self.low:g} and `high` {self.high:g} bound the ratio of two policies, which is 1 where they are "
                "equal: set `low` to at most 1, and `high` to at least 1 and above `low`"
            )
        if self.measure != "ratio" and "high" not in self.model_fields_set:
            raise ValueError(f"`measure: {self.measure}` needs `high`, whose default is a bound of ratios")
        if self.measure == "tv" and self.high >= 1:
            raise ValueError(f"`high` {self.high:g} bounds nothing: the total variation is at most 1")
        return self


class CriticConfig(Config):
    """Critic for generalized advantage estimation."""

    RENAMED: ClassVar = {"clip": "value_clip", "steps_ahead": "freezing_steps"}

    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate of the critic."""
    value_clip: float | None = Field(0.5, gt=0)
    """Value clipping: maximum change of a value by an update, in units of the reward. Default: OpenRLHF 0.11's. Ziegler et
    al. 2019 have 0.2, at which rewards of a larger scale are learned slowly. Null disables it."""
    normalise: bool = unkeyed(False)
    """Train the critic on returns that are standardised by the running mean and standard deviation, for rewards that are large,
    small or drifting. `value_clip` is then in these units."""
    freezing_steps: int = Field(0, ge=0)
    """Number of initial steps that train only the critic. The policy's warm-up begins after them."""
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] | None = unkeyed(None)
    """Schedule of the critic's learning rate. Default, as of all fields below: that of `rl.training`."""
    warmup_ratio: float | None = unkeyed(None, ge=0, le=1)
    """Fraction of the steps over which the critic's learning rate rises linearly from zero."""
    warmup_steps: int | None = unkeyed(None, ge=0)
    """Number of these steps, instead of `warmup_ratio`."""
    min_lr_ratio: float | None = unkeyed(None, ge=0, le=1)
    """Final learning rate of the critic, as a fraction of its peak."""
    weight_decay: float | None = unkeyed(None, ge=0)
    """Decoupled weight decay of the critic."""
    adam_beta1: float | None = unkeyed(None, ge=0, lt=1)
    """AdamW's β₁ for the critic."""
    adam_beta2: float | None = unkeyed(None, ge=0, lt=1)
    """AdamW's β₂ for the critic."""
    adam_epsilon: float | None = unkeyed(None, gt=0)
    """AdamW's ε for the critic."""
    max_grad_norm: float | None = unkeyed(None, gt=0)
    """Maximum norm of the critic's gradient, for clipping."""

    def training_of(self, policy: TrainingConfig) -> TrainingConfig:
        """The optimiser and schedule of the critic: those of the ``policy`` where the critic has none of its own."""
        values = {name: getattr(self, name, None) for name in TrainingConfig.model_fields}
        own = {name: value for name, value in values.items() if value is not None}
        if self.warmup_ratio is not None or self.warmup_steps is not None:
            own = {"warmup_ratio": 0.0, "warmup_steps": 0, **own}
        return policy.model_copy(update=own)

    def check_training(self, policy: TrainingConfig, info: ValidationInfo) -> None:
        """Raise ValueError for fields that exclude each other, or that the ``policy``'s optimiser does not have."""
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("`rl.critic.warmup_steps` and `rl.critic.warmup_ratio` exclude each other: leave one out")
        if policy.optimizer == "adafactor":
            self.refuse_unused(info, ADAM, "in `rl.critic` with `rl.training.optimizer: adafactor`")
        training = self.training_of(policy)
        if training.lr_scheduler_type == "constant":
            self.refuse_unused(info, ("min_lr_ratio",), "in `rl.critic` with a constant learning rate")
        if training.lr_scheduler_type == "wsd" and training.warmup_ratio + training.decay_ratio > 1:
            raise ValueError(
                f"`warmup_ratio` {training.warmup_ratio} of `rl.critic` and `decay_ratio` {training.decay_ratio} of "
                "`rl.training` must not exceed 1 in sum"
            )


class ExecutionConfig(Config):
    """Schedule of sampling and training. `resources.placement` decides where they run."""

    max_staleness: int = Field(0, ge=0)
    """Maximum number of steps by which the weights that began a completion may be older than those that are trained on it. 0
    alternates sampling and training; above 0 the engines sample while the policy trains."""
    partial_rollouts: bool = True
    """With `max_staleness` above 0: completions in progress continue with new weights as soon as these are available. With
    `false`, the update waits until these completions are done."""

    @model_validator(mode="after")
    def _has_rollouts_in_progress(self, info: ValidationInfo) -> ExecutionConfig:
        if not self.max_staleness:
            self.refuse_unused(info, ("partial_rollouts",), "with `max_staleness: 0`")
        return self


class PretrainingConfig(Config):
    """Demonstrations or texts whose loss is added to each optimiser step of the policy (PPO-ptx)."""

    data: DataConfig
    """Demonstrations or texts, as for `sft`."""
    coefficient: float = Field(0.05, gt=0)
    """Weight of their mean loss per token."""
    batch_size: int = Field(32, ge=1)
    """Rows per optimiser step; each row is used once per epoch."""


class EmaConfig(Config):
    """Exponential moving average of the policy's weights, in fp32."""

    decay: float = Field(0.992, gt=0, lt=1)
    """Decay per optimiser step: average ← decay · average + (1 − decay) · weights."""


class BestPolicyConfig(Config):
    """Keep the weights with the highest mean reward on held-out prompts."""

    prompts: DataConfig
    """Held-out prompts; completions of all of them are sampled at each evaluation, with the settings of training."""
    eval_steps: int = Field(10, ge=1)
    """Number of steps between evaluations; the last step is always evaluated. The reward is the weighted sum before
    normalisation and shaping."""

    @model_validator(mode="after")
    def _measures_all_prompts(self, info: ValidationInfo) -> BestPolicyConfig:
        self.prompts.refuse_test_rows(info, "prompts")
        return self


class TrajectoriesConfig(Config):
    """Trajectories that are kept as an output of the stage: completions with tokens, log-probabilities, rewards and
    advantages."""

    keep: Literal["all", "last", "every"] = "last"
    """Keep all steps, the last `steps`, or every `steps`-th. A token takes about 35 bytes before compression: with `all`, 512
    completions of 512 tokens are up to 9 MB per step, and of 8,192 tokens up to 150 MB. Default: `last`, so that the size does
    not grow with the number of steps. (TRL and OpenRLHF keep none by default.)"""
    steps: int = Field(10, ge=1)
    """With `last`: number of steps to keep. With `every`: interval in steps."""


class RlConfig(Config):
    """Reinforcement learning: every step samples completions, rewards them, computes advantages and updates the
    policy."""

    RENAMED: ClassVar = {"mismatch": "importance_sampling_correction"}

    prompts: DataConfig
    """Prompts to sample from; every step takes the next ones, and each is used once per epoch."""
    steps: int = Field(100, ge=1)
    """Number of steps."""
    prompts_per_step: int = Field(64, ge=1)
    """Number of prompts in each step. With 8 completions each, a step has 512 for two updates of 256."""
    generation: GenerationConfig = GenerationConfig(num_generations=8)
    """Sampling parameters."""
    environment: EnvironmentConfig | None = None
    """Environment or agent for episodes of several turns; `max_completion_length` limits turns and observations together.
    Default: one turn."""
    rewards: tuple[Reward, ...] = Field(min_length=1)
    """Rewards of a completion; their weighted sum is used."""
    shaping: ShapingConfig = ShapingConfig()
    """Length penalties."""
    filter: FilterConfig | None = None
    """Dynamic sampling. Default: train on every prompt."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimation."""
    loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss."""
    kl: KlConfig = KlConfig()
    """KL penalty to the initial policy."""
    importance_sampling_correction: ImportanceSamplingConfig = ImportanceSamplingConfig()
    """Correction of the mismatch between sampling and training."""
    critic: CriticConfig | None = None
    """Critic, for the estimator `gae`."""
    execution: ExecutionConfig = ExecutionConfig()
    """Schedule of sampling and training."""
    pretraining: PretrainingConfig | None = unkeyed(None)
    """Add the loss on other rows (PPO-ptx). Default: none."""
    ema: EmaConfig | None = unkeyed(None)
    """Keep an exponential moving average of the policy. Default: none."""
    best: BestPolicyConfig | None = unkeyed(None)
    """Evaluate on held-out prompts during training and keep the best weights. Default: none."""
    result: Literal["last", "average", "best"] = "last"
    """Weights that are evaluated and promoted: the last, their average (`ema`) or the best (`best`). All that exist
    are outputs of the stage."""
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    """Trajectories to keep."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6, batch_size=256, warmup_ratio=0.03)
    """Optimiser and schedule. `batch_size` counts completions, and `num_train_epochs` passes over the completions of a step."""

    @classmethod
    def section_defaults(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """With those that depend on the rewards, or on the precision."""
        defaults = {**super().section_defaults(content)}
        rewards = content.get("rewards")
        rewards = rewards if isinstance(rewards, list | tuple) else ()
        if any(_given(reward, key) for reward in rewards for key in LEARNED):
            defaults["kl"] = {"coefficient": 0.04}
        correction = content.get("importance_sampling_correction")
        chosen = any(_given(correction, name) for name in ("mode", *ImportanceSamplingConfig.RENAMED))
        if _given(content.get("training"), "bf16") and not chosen:
            is_stale = bool(_given(content.get("execution"), "max_staleness"))
            usual = OF_STALE if is_stale else OF_ROUNDING
            if _given(correction, "measure") not in (None, "ratio"):
                usual = {name: value for name, value in usual.items() if name != "high"}  # a bound of ratios
            defaults["importance_sampling_correction"] = usual
        if content.get("critic") is not None and _given(content.get("advantage"), "estimator") == "gae":
            starts_trained = any(_given(reward, "reward_model") for reward in rewards)
            defaults["advantage"] = {} if starts_trained else {"gae_lambda": 1.0}
            if rewards:
                defaults["rewards"] = [{"clip": MOST_LEARNED} if _is_unscaled(reward) else {} for reward in rewards]
        return defaults

    @property
    def trains_adapters_alone(self) -> bool:
        """Whether the policy without its adapters stays the initial policy, so that it can be the reference."""
        lora = self.training.lora
        return lora is not None and not lora.modules_to_save

    def needs_old_logps(self, completions: int) -> bool:
        """Whether the policy's log-probabilities of a step's completions are computed before its update: because the policy
        changes while it trains on them, for the KL in the reward, or to select tokens by their entropy."""
        off_policy = self.training.num_train_epochs > 1 or self.training.batch_size < completions
        selects = self.loss.top_entropy_quantile < 1
        return off_policy or selects or (self.kl.place == "reward" and self.kl.coefficient > 0)

    def why_reference_is_beside(self, is_another_model: bool) -> str | None:
        """Why the reference must be on the policy's ranks, so that ``resources.models.reference`` is refused; None if it need
        not. ``is_another_model``: it is not the initial policy."""
        if self.trains_adapters_alone and not is_another_model:
            return (
                "with `rl.training.lora` the reference is the policy without its adapters, which needs no GPUs of its own: "
                "leave it out"
            )
        if self.kl.sync_ref_model:
            return (
                "`rl.kl.sync_ref_model` copies the policy's weights into the reference, which must be on the same GPUs for "
                "that: leave one of them out"
            )
        return None

    @property
    def first_reward_model(self) -> int | None:
        """The number of the first reward by a reward model, from which a critic is initialised; None without one."""
        return next((number for number, reward in enumerate(self.rewards) if reward.KEY == "reward_model"), None)

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> RlConfig:
        if (self.advantage.estimator == "gae") != (self.critic is not None):
            raise ValueError("`rl.critic` and the estimator `gae` need each other: set both or neither")
        alone = self.generation.num_generations == 1
        if alone and (
            self.advantage.estimator in ("group", "leave-one-out") or self.advantage.scale_rewards == "group"
        ):
            raise ValueError(
                "`rl.generation.num_generations` is 1, so a prompt's completions have no mean but their own: raise it, or "
                "use the estimator `batch`"
            )
        if alone and self.filter is not None:
            raise ValueError(
                "`rl.generation.num_generations` is 1, so no prompt has completions that differ in their reward, "
                "and `rl.filter` would drop all prompts: raise it, or drop the filter"
            )
        if not self.generation.samples_all_tokens:
            raise ValueError(
                "`rl.generation` must sample from the unmodified policy, at any `temperature` above 0: leave out `top_p`, "
                "`top_k` and `min_p`, because excluded tokens have no probability to learn from"
            )
        if (self.environment is not None) != any(reward.of_environment for reward in self.rewards):
            raise ValueError(
                "`rl.environment` and a reward with `environment: true` need each other: set both or neither"
            )
        if any(reward.by_step for reward in self.rewards):
            if self.environment is not None:
                raise ValueError(
                    "`rl.environment` has episodes of several turns, and `per_step` rewards are for answers of one"
                )
            summed = any(reward.by_step == "sum" for reward in self.rewards)
            if self.advantage.estimator == "leave-one-out" and summed:
                raise ValueError(
                    "`rl.advantage.estimator: leave-one-out` is not defined for `per_step: sum`, whose baseline "
                    "contains steps of the same answer: use `group`"
                )
        if self.critic is not None:
            self.critic.check_training(self.training, info)
            if self.critic.freezing_steps >= self.steps and refuses_unused(info.context):
                raise ValueError(
                    f"`rl.critic.freezing_steps` {self.critic.freezing_steps} leaves none of `rl.steps` {self.steps} to train "
                    "the policy: lower it, or take more steps"
                )
        self.training.refuse_unused(
            info, ("max_steps",), "in `rl.training`, because `rl.steps` sets the number of steps"
        )
        self.training.refuse_unused(info, EVALUATION_FIELDS, "in `rl.training`", "use `rl.best`")
        self.training.check_save_steps(info, "rl.steps", self.steps)
        if self.training.num_train_epochs % 1:
            raise ValueError(
                f"`rl.training.num_train_epochs` {self.training.num_train_epochs:g} counts passes over the completions of a "
                "step, which are whole: use a whole number (`rl.steps` sets the length of the training)"
            )
        if self.kl.place == "reward":
            self.kl.refuse_unused(info, ("unbiased_gradient",), "with `rl.kl.place: reward`, which has no gradient")
        if self.kl.coefficient == 0:
            self.kl.refuse_unused(
                info, ("reference", "sync_ref_model"), "with `rl.kl.coefficient: 0`, which needs no reference"
            )
        if self.kl.sync_ref_model is not None and self.training.lora:
            raise ValueError(
                "`rl.kl.sync_ref_model` mixes whole weights, and `rl.training.lora` trains none: remove one of them"
            )
        if self.kl.target is None:
            self.kl.refuse_unused(info, ("horizon",), "without `rl.kl.target`")
        elif self.kl.coefficient == 0:
            raise ValueError("`rl.kl.target` adapts `rl.kl.coefficient`, which needs a value above 0 to start from")
        completions = self.prompts_per_step * self.generation.num_generations
        shortest = self.kl.horizon / MOST_ADAPTED
        if self.kl.target is not None and completions >= shortest and refuses_unused(info.context):
            raise ValueError(
                f"`rl.kl.horizon` {self.kl.horizon} lets a step of {completions:,} completions lower the coefficient by "
                f"{completions / shortest:.0%}, to zero or below: set it above {completions * MOST_ADAPTED:g}"
            )
        if self.result == "average" and self.ema is None:
            raise ValueError("`rl.result: average` needs the section `rl.ema`: add `ema: {}`, or use `result: last`")
        if self.result == "best" and self.best is None:
            raise ValueError(
                "`rl.result: best` needs the section `rl.best`: add `best: {prompts: …}`, or use `result: last`"
            )
        return self
