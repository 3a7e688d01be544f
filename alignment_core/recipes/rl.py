"""Reinforcement learning: how completions are rewarded, what that makes of their tokens, and how the policy follows."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from alignment_core.recipes.base import Config
from alignment_core.recipes.data import DataConfig
from alignment_core.recipes.model import ModelConfig
from alignment_core.recipes.paths import CodePath, code_path
from alignment_core.recipes.rollout import GenerationConfig
from alignment_core.recipes.training import TrainingConfig
from alignment_core.source_code import PACKAGE

KINDS = ("verifier", "reward_model", "function", "urls", "environment")
"""The fields of a reward of which exactly one says what it is."""


def _unset(section: object) -> bool:
    """A section that is not there is no part of the stage's key either."""
    return section is None


def _or_one_text(schema: dict[str, Any]) -> None:
    """One text stands for a list of one."""
    schema["anyOf"] = [{"type": schema.pop("type"), "items": schema.pop("items")}, {"type": "string"}]


class RewardConfig(Config):
    """One thing that completions are rewarded for: exactly one of `verifier`, `reward_model`, `function`, `urls` and
    `environment`."""

    verifier: CodePath | None = None
    """Function that scores one completion: `task` (the built-in task's own), `math` (the answer equals the label), `code`
    (the program passes the label's tests), `reasoning_gym` (that library's own score), `module:function` or
    `file.py:function`. It is called with prompt, completion and label, and returns a number in [0, 1]."""
    reward_model: Literal["ours"] | ModelConfig | None = None
    """A reward model: `ours` is that of the recipe's section `reward_model`, anything else names a model."""
    function: CodePath | None = None
    """Function that rewards all completions of a prompt at once: `module:function` or `file.py:function`, may be `async`.
    It is called with a list of dicts and returns as many numbers, or None for a completion without a reward."""
    urls: tuple[str, ...] = Field((), json_schema_extra=_or_one_text)
    """Replicas of one HTTP endpoint; the first names it and is part of what decides a result."""
    environment: bool = False
    """The sum of what the environment of `rl.environment` gave in the completion's turns."""
    batch_size: int = Field(32, ge=1)
    """With `urls`: completions per request."""
    token_variable: str | None = None
    """With `urls`: the environment variable that holds the bearer token."""
    weight: float = 1.0
    """What it counts in the sum of all."""
    clip: tuple[float, float] | None = None
    """Bounds of each reward, before anything else is done to it."""
    normalise: Literal["none", "group", "batch", "running"] = "none"
    """Less the mean and over the standard deviation of the prompt's completions, of the step's, or of all so far."""
    max_failed: float = Field(0.01, ge=0, le=0.5)
    """Share of a step's completions that may go without this reward; they are counted and left out."""

    @model_validator(mode="after")
    def _is_one_thing(self) -> RewardConfig:
        if sum(bool(getattr(self, kind)) for kind in KINDS) != 1:
            raise ValueError(f"a reward needs exactly one of {', '.join(f'`{kind}`' for kind in KINDS)}")
        if self.token_variable is not None and not self.urls:
            raise ValueError("`token_variable` is for `urls`")
        if self.clip and self.clip[0] >= self.clip[1]:
            raise ValueError("`clip` needs a lower and then an upper bound")
        return self

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, urls: Any) -> Any:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is no http:// or https:// URL")
            if parts.username or parts.password:
                raise ValueError(
                    "a URL of a recipe holds no password; name the variable of a token in `token_variable`"
                )
        return urls


def _functions(value: Any) -> Any:
    return [code_path(one) for one in value] if isinstance(value, list) else code_path(value)


class EnvironmentConfig(Config):
    """What answers the policy between its turns, a class or an agent. Each completion has its own, in another process."""

    name: CodePath | None = None
    """A class: `module:Class` or `file.py:Class`. `reset(prompt, label)` returns what the policy is told beside its prompt,
    or None; `step(completion)` returns a dict with `observation` (what the policy is told next: a text, or a list of
    texts that are a message each), `reward` and `done`. Both may be `async`; a method `close()` is called at the end if there
    is one. `alignment_core.rollout.tools:Tools` runs tools."""
    agent: CodePath | None = Field(None, exclude_if=_unset)
    """A function, `module:function` or `file.py:function`, may be `async`: `agent(prompt, label, base_url, api_key)` asks the
    policy by `POST {base_url}/chat/completions`, as OpenAI's API has it, and returns the episode's reward."""
    options: dict[str, Any] = {}
    """Arguments that the class is made with, or further ones of the agent."""
    max_turns: int = Field(8, ge=1)
    """Turns of the policy after which an episode is over."""
    episode_seconds: float = Field(600.0, gt=0)
    """How long an episode may take; one that takes longer has no reward."""
    role: Literal["user", "tool"] = "user"
    """As whom the chat template has a class speak; without a template its words follow as they are."""

    @field_validator("options")
    @classmethod
    def _functions_of_ours(cls, options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """In the options of our own environments, `file.py:function` is a path, too; what others' mean is not known."""
        ours = (info.data.get("name") or "").startswith(f"{PACKAGE}.")
        return {name: _functions(value) for name, value in options.items()} if ours else options

    @model_validator(mode="after")
    def _is_one_thing(self) -> EnvironmentConfig:
        if (self.name is None) == (self.agent is None):
            raise ValueError("give exactly one of `name` (a class) and `agent` (a function)")
        return self


class ShapingConfig(Config):
    """What a completion's length does to its reward."""

    overlong_buffer: int = Field(0, ge=0)
    """The last so many of `max_completion_length` tokens cost more and more, up to `overlong_penalty` (DAPO)."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What the longest completion loses."""
    truncation_penalty: float = Field(0.0, ge=0)
    """What a completion loses that was cut at `max_completion_length`."""


class FilterConfig(Config):
    """Dynamic sampling (DAPO): prompts whose completions all have the same reward teach nothing and are replaced by further
    ones. Rewards are compared as they were given, clipped and weighted, before any normalisation and shaping."""

    low: float | None = None
    """Also leave out prompts whose mean reward is not above this. The bounds are meant for rewards in [0, 1], such as a
    verifier's: `low: 0.1` leaves out what is too hard. Default: no bound."""
    high: float | None = None
    """Also leave out prompts whose mean reward is not below this. Default: no bound."""
    max_refills: int = Field(3, ge=0)
    """Samplings of further prompts in one step; a step that is then short of prompts trains on fewer."""

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> FilterConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"`low` {self.low:g} is not below `high` {self.high:g}, so that no prompt would stay")
        return self


class AdvantageConfig(Config):
    """What a sampled token was worth."""

    estimator: Literal["gae", "returns", "group", "leave-one-out", "batch"] = "group"
    """`gae` needs a critic. The others are the return of a token less a baseline: none (REINFORCE++), the mean of the
    prompt's completions (REINFORCE++-baseline, GRPO, Dr. GRPO), the mean of the others (RLOO), that of the batch."""
    divide_by_deviation: bool = False
    """Divide by the standard deviation of the prompt's rewards (GRPO)."""
    whiten: Literal["none", "mean", "mean-and-deviation"] = "none"
    """Subtract the mean of the whole batch's advantages, and divide by their standard deviation."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount from a token to the next."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's λ."""


class PolicyLossConfig(Config):
    """How the policy follows the advantages."""

    loss_type: Literal["clip", "gspo", "cispo", "sapo"] = "clip"
    """Clipped ratio (PPO), the clipped ratio of the sequence (GSPO), CISPO, or SAPO."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio counts from 1 less this on."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio counts up to 1 plus this (clip-higher: more than `clip_low`)."""
    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage a ratio counts no more than this."""
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """SAPO's τ for positive and for other advantages."""
    aggregation: Literal["token-mean", "sequence-mean-token-mean", "fixed-length"] = "token-mean"
    """Every token counts alike, every completion counts alike, or every completion counts as long as the longest allowed
    (Dr. GRPO)."""

    entropy_bonus: float = Field(0.0, ge=0)
    """Weight of the entropy per token in nats, by which the loss is lowered."""


class KlConfig(Config):
    """The pull towards the policy at the start; with a coefficient of 0 no reference model is loaded."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the KL in nats per token."""
    place: Literal["loss", "reward"] = "loss"
    """Part of the loss, or taken from each token's reward."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators."""
    unbiased_gradient: bool = False
    """In the loss: the estimator's value with the gradient of the KL itself (that of k2)."""
    target: float | None = Field(None, gt=0)
    """Adapt the coefficient so that the mean KL per token comes to this."""
    horizon: int = Field(10000, ge=1)
    """Completions over which an adaptive coefficient moves by as much as the KL is off target."""


class MismatchConfig(Config):
    """The policy that samples (vLLM) is not quite the one that is trained: what is done about it."""

    correction: Literal["none", "clip", "mask"] = "none"
    """Weigh each token by its importance ratio, limited (`clip`) or set to 0 (`mask`) where the two differ too much."""
    level: Literal["token", "sequence"] = "token"
    """What is judged: a token, or its whole completion."""
    measure: Literal["ratio", "kl", "tv"] = "ratio"
    """By what: the ratio of the two probabilities, or the binary KL or total variation of the sampled token."""
    low: float = Field(0.0, ge=0)
    """Least ratio."""
    high: float = Field(2.0, gt=0)
    """Largest ratio, KL in nats, or total variation."""
    stop_above: float = Field(0.1, gt=0)
    """End the run when a step's mean mismatch is above this: the engine does not hold the policy. Nats per token."""


class CriticConfig(Config):
    """The critic of GAE."""

    learning_rate: float = Field(1e-5, gt=0)
    """Its own peak learning rate."""
    clip: float | None = Field(0.2, gt=0)
    """Values may move this far from those before the update; none leaves them free."""
    steps_ahead: int = Field(0, ge=0)
    """Steps that it trains before the policy does."""


class ExecutionConfig(Config):
    """How sampling and training share the time. Where they run is a matter of `resources.placement`."""

    max_staleness: int = Field(0, ge=0)
    """Steps that the weights of a completion's first token may be behind those that train on it: 0 samples and trains in
    turn, more lets the engines sample while the policy trains."""
    partial_rollouts: bool = True
    """With `max_staleness` above 0: completions under way go on with new weights as soon as there are some. Otherwise the
    new weights wait until these completions are done."""


class PretrainingConfig(Config):
    """Demonstrations or texts whose loss is mixed into each of the policy's optimiser steps (PPO-ptx)."""

    data: DataConfig
    """Demonstrations or texts, as for `sft`."""
    coefficient: float = Field(0.05, gt=0)
    """Weight of their mean loss per token beside the policy's own."""
    batch_size: int = Field(32, ge=1)
    """Rows of each optimiser step; an epoch takes each once."""


class EmaConfig(Config):
    """The exponential moving average of the policy's weights, in fp32."""

    decay: float = Field(0.992, gt=0, lt=1)
    """What the average keeps of itself at each optimiser step; the rest are the new weights."""


class BestConfig(Config):
    """Keep the weights whose completions of held-out prompts are rewarded best."""

    prompts: DataConfig
    """Held-out prompts; all are sampled for each time, as the steps sample."""
    eval_steps: int = Field(10, ge=1)
    """Look after every so many steps, and after the last. Rewards count as they were given, weighted, before any
    normalisation and shaping."""


class TrajectoriesConfig(Config):
    """Which steps' completions stay in the run's artifact, with tokens, log-probabilities, rewards and advantages."""

    keep: Literal["all", "last", "every"] = "all"
    """Those of all steps, of the last `steps`, or of every `steps`-th."""
    steps: int = Field(10, ge=1)
    """How many, or how far apart."""

    def keeps(self, step: int, total: int) -> bool:
        """Whether those of this step (from 0) stay."""
        if self.keep == "last":
            return step >= total - self.steps
        return self.keep == "all" or step % self.steps == 0


class RlConfig(Config):
    """Steps of sample → reward → advantages → update."""

    prompts: DataConfig
    """Prompts to sample for; every step takes the next ones, and an epoch takes each once."""
    steps: int = Field(100, ge=1)
    """Number of steps."""
    prompts_per_step: int = Field(64, ge=1)
    """Prompts in each step."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling."""
    environment: EnvironmentConfig | None = None
    """What answers the policy between its turns; none asks for one turn. All turns and answers of a completion share its
    `max_completion_length`."""
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    """What completions are rewarded for; the weighted sum counts."""
    shaping: ShapingConfig = ShapingConfig()
    """What length does to the reward."""
    filter: FilterConfig | None = None
    """Dynamic filtering; none trains on every prompt."""
    advantage: AdvantageConfig = AdvantageConfig()
    """What tokens were worth."""
    loss: PolicyLossConfig = PolicyLossConfig()
    """How the policy follows."""
    kl: KlConfig = KlConfig()
    """The pull towards the start."""
    mismatch: MismatchConfig = MismatchConfig()
    """What is done about the difference between sampling and training."""
    critic: CriticConfig | None = None
    """With the estimator `gae`: the critic."""
    execution: ExecutionConfig = ExecutionConfig()
    """Whether sampling runs ahead of training."""
    pretraining: PretrainingConfig | None = Field(None, exclude_if=_unset)
    """Mix in the loss on other rows; none mixes in nothing."""
    ema: EmaConfig | None = Field(None, exclude_if=_unset)
    """Keep a moving average of the policy; none keeps none."""
    best: BestConfig | None = Field(None, exclude_if=_unset)
    """Keep the best weights by held-out prompts; none looks at none."""
    result: Literal["last", "average", "best"] = "last"
    """The run's policy, which is evaluated and promoted: the last weights, their average (`ema`) or the best (`best`). All
    that there are stay in the run's artifact."""
    trajectories: TrajectoriesConfig = TrajectoriesConfig()
    """What is kept of what was sampled."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6, batch_size=256)
    """Optimiser and schedule; `batch_size` counts completions, and `num_train_epochs` passes over each step's."""

    @model_validator(mode="after")
    def _fits_together(self) -> RlConfig:
        if (self.advantage.estimator == "gae") != (self.critic is not None):
            raise ValueError("`rl.critic` and the estimator `gae` need each other: set both or neither")
        alone = self.generation.num_generations == 1
        if alone and (self.advantage.estimator in ("group", "leave-one-out") or self.advantage.divide_by_deviation):
            raise ValueError(
                "`rl.generation.num_generations` is 1, so a prompt's completions have no mean but their own: raise it, or "
                "use the estimator `batch`"
            )
        if alone and self.filter is not None:
            raise ValueError(
                "`rl.generation.num_generations` is 1, so no prompt has completions that differ in their reward, and "
                "`rl.filter` would leave out all: raise it, or drop the filter"
            )
        sampling = self.generation
        if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0:
            raise ValueError(
                "`rl.generation` samples from the policy itself, at any `temperature` above 0: leave `top_p`, `top_k` and "
                "`min_p` out, as the tokens that they exclude would have no probability to learn from"
            )
        if (self.environment is not None) != any(reward.environment for reward in self.rewards):
            raise ValueError(
                "`rl.environment` and a reward with `environment: true` need each other: set both or neither"
            )
        if self.kl.target is not None and self.kl.coefficient == 0:
            raise ValueError("`rl.kl.target` adapts `rl.kl.coefficient`, which needs a value above 0 to start from")
        if self.result == "average" and self.ema is None:
            raise ValueError("`rl.result: average` needs the section `rl.ema`: add `ema: {}`, or take `result: last`")
        if self.result == "best" and self.best is None:
            raise ValueError(
                "`rl.result: best` needs the section `rl.best`: add `best: {prompts: …}`, or take `result: last`"
            )
        return self
