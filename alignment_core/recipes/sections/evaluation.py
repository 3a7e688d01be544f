"""Evaluation of policies, and gates of promotions."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from alignment_core.recipes.base import Config, refuses_unused, unkeyed
from alignment_core.recipes.paths import CodePath
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.lm_eval import PREFIX, LmEvalConfig
from alignment_core.recipes.sections.pairwise_judge import PairwiseJudgeConfig
from alignment_core.recipes.sections.rewards import Reward, check_rewards, check_verifier
from alignment_core.recipes.sections.rollout import GenerationConfig


class EvaluationConfig(Config):
    """Completions of held-out prompts, and statistics of them."""

    prompts: DataConfig
    """Held-out prompts. Equal ones count as one in metrics with an interval."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling parameters."""
    verifier: CodePath | None = None
    """Function that scores one completion: `task` (the built-in task's own), `math` (the answer equals the label), `code`
    (the program passes the label's tests), `reasoning_gym` (that library's own score), `module:function` or
    `file.py:function`. It is called with prompt, completion and label, and returns a number in [0, 1]; their mean is the
    metric `accuracy`."""
    skip_special_tokens: bool = unkeyed(True)
    """Remove special tokens from the text that `verifier` gets. With `false` the text has the sampled special tokens, such as
    `<think>` if it is one in the tokenizer; the end-of-turn token is always removed. Each of `rewards` has this field too."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of a completion; the mean of their weighted sum is the metric `reward`, and `win_rate` compares it. They are
    clipped but not normalised, because normalised rewards of two policies are not comparable. Default: the reward
    model of the section `reward_model`, if the recipe has one."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = unkeyed(())
    """Values of k for the metric `pass@k`: the probability that at least one of k completions gets 1 from the verifier, by the
    unbiased estimator over all `num_generations` of a prompt (Chen et al. 2021)."""
    judge: PairwiseJudgeConfig | None = unkeyed(None)
    """Language model that compares answers with those of the baseline, in both orders, for the metric `judged_win_rate`. Two
    contradicting verdicts are a tie."""
    lm_eval: LmEvalConfig | None = unkeyed(None)
    """Tasks of the library `lm-eval`, for the metrics `lm_eval/<task>/<metric>`."""
    max_overlap: float = Field(0.0, ge=0, le=1)
    """Maximum share of prompts that are also training prompts, if `promotion.gates` depend on them. The overlap is counted in
    any case."""
    max_failed_rewards: float = Field(0.01, ge=0, le=0.5)
    """Maximum share of completions for which the verifier may fail or give no answer (at least one completion, unless it is 0).
    They are counted and left out."""
    win_margin: float = Field(0.0, ge=0)
    """Rewards closer than this are a tie, worth half a win."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the intervals: Wilson's for `accuracy`, `pass@k` and win rates, bootstrap for `reward`, `kl` and `length`."""
    resamples: int = Field(2000, ge=100)
    """Bootstrap resamples (of prompts)."""

    @model_validator(mode="after")
    def _verifies_its_prompts(self, info: ValidationInfo) -> EvaluationConfig:
        self.prompts.refuse_test_rows(info, "prompts")
        self.check_verifier(self.prompts, "prompts")
        check_rewards(self.rewards, "rewards", self.prompts, "prompts")
        if self.verifier is None:
            self.refuse_unused(info, ("skip_special_tokens",), "without a `verifier`")
        if self.pass_at and self.verifier is None:
            raise ValueError("`pass_at` needs a `verifier`")
        if max(self.pass_at, default=0) > self.generation.num_generations:
            raise ValueError(
                f"`pass_at` needs {max(self.pass_at)} completions of a prompt: raise `generation.num_generations` from "
                f"{self.generation.num_generations}"
            )
        return self

    def check_verifier(self, prompts: DataConfig, where: str) -> None:
        """Raise ValueError if the verifier is for built-in tasks only, and a source of ``prompts`` is not a built-in task."""
        if self.verifier is not None:
            check_verifier(self.verifier, prompts, where, "; name a function")


REPOSITORY = r"hf://[\w.-]+/[\w.-]+"
OF_SAMPLES = ("kl", "kl_to_model", "baseline_perplexity")
"""Metrics that are estimated from samples of the unmodified policy."""
METRICS = ("accuracy", "reward", "win_rate", "judged_win_rate", *OF_SAMPLES, "length", "truncated")
WITHOUT_INTERVAL = ("baseline_perplexity", "truncated")
ENDS = ("low", "high")
"""Ends of an interval, as in ``win_rate.low``."""
NUMBERED = r"pass@[1-9]\d*|reward_\d+"
"""Metrics with a number in their name."""
HELD_OUT_METRICS = ("test_loss", "test_accuracy", "test_margin", "reward_model_accuracy")
"""Metrics on the held-out rows of a training, of the policy or of the reward model."""
OF_TRAINING = ("test_accuracy", "test_loss")
"""Metrics on held-out rows that can rank the variants of a sweep, in order of preference."""


def check_metric(metric: str, info: ValidationInfo) -> None:
    """Raise ValueError if no evaluation has this metric: an unknown name, or an end of an interval that it does not have, which
    stored recipes may name."""
    of_task = metric.startswith(PREFIX)  # the names of tasks are known to lm-eval only
    name, dot, end = metric.rpartition(".") if of_task else metric.partition(".")
    is_end = bool(dot) and end in ENDS
    if not of_task and ((name not in METRICS and not re.fullmatch(NUMBERED, name)) or (dot and not is_end)):
        near = difflib.get_close_matches(name, (*METRICS, *HELD_OUT_METRICS), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join((*METRICS, *HELD_OUT_METRICS))}"
        raise ValueError(f"no metric {metric!r}; {hint}")
    has_interval = not of_task and name not in WITHOUT_INTERVAL and not name.startswith("reward_")
    if is_end and not has_interval and refuses_unused(info.context):
        raise ValueError(f"{name!r} has no interval: use the metric itself")


class Gate(Config):
    """A condition on a metric; a promotion must pass all gates."""

    metric: str
    """Metric of the final policy: `accuracy`, `reward`, `win_rate`, `judged_win_rate`, `kl`, `baseline_perplexity`,
    `length`, `truncated`, `pass@k`, `lm_eval/<task>/<metric>` or, with several `evaluation.rewards`, `reward_0`,
    `reward_1`, … for the mean of each. `win_rate.low` and `win_rate.high` are the ends of its interval. `kl` is to the
    policy that the run started from; in nights, `kl_to_model` is to the recipe's `model`, and so bounds the drift over
    all nights. `baseline_perplexity` is the perplexity of the policy's completions under the policy that the run started
    from. These three need an `evaluation.generation` with a `temperature` above 0 and without `top_p`, `top_k` and
    `min_p`. Without an evaluation, on held-out rows of the training: `test_loss`, for DPO and KTO also `test_accuracy`,
    for DPO also `test_margin` (the mean difference of implicit rewards), and for a reward model `reward_model_accuracy`."""
    min: float | None = None
    """Minimum value."""
    max: float | None = None
    """Maximum value."""
    min_gain: float | None = None
    """Minimum gain over the same metric of the policy that the tag points to, evaluated on the same prompts; while the
    tag does not exist, over that of the initial policy. A metric of training is compared with its value before the first
    step. For a metric that should be low, such as a loss or a perplexity, it is the minimum decrease."""

    @property
    def measures(self) -> str:
        """The metric without the end of its interval."""
        return self.metric.partition(".")[0]

    @property
    def is_of_training(self) -> bool:
        """Whether the metric is measured by a training, and not by the evaluation."""
        return self.metric in HELD_OUT_METRICS

    @property
    def compares(self) -> bool:
        """Whether the gate compares the policy with another one."""
        gains = self.min_gain is not None and not self.is_of_training
        return gains or self.measures in ("win_rate", "judged_win_rate")

    @model_validator(mode="after")
    def _known_metric(self, info: ValidationInfo) -> Gate:
        if self.is_of_training:
            if self.min_gain is not None and self.metric == "reward_model_accuracy":
                raise ValueError(
                    f"`min_gain` makes no sense for {self.metric!r}, which begins with a new head: give a `min`"
                )
            return self
        check_metric(self.metric, info)
        name = self.measures
        if self.min_gain is not None and name in ("win_rate", "judged_win_rate", *OF_SAMPLES):
            raise ValueError(f"`min_gain` makes no sense for {name!r}, which is measured against the baseline already")
        return self

    @model_validator(mode="after")
    def _some_bound(self) -> Gate:
        if self.min is None and self.max is None and self.min_gain is None:
            raise ValueError("a gate needs at least one of `min`, `max` and `min_gain`")
        return self


class PromotionConfig(Config):
    """The tag that is moved to the new policy, and the conditions for it."""

    tag: str = "policy/production"
    """The tag to move."""
    gates: tuple[Gate, ...] = ()
    """Conditions that must all hold."""
    attest: bool = True
    """Write the policy's provenance (in-toto, SLSA) and bill of materials (CycloneDX) beside it in the store."""
    sign: Literal["key"] | None = None
    """`key`: sign the policy with the elliptic-curve key at `$ALIGN_SIGNING_KEY`. Default: no signature."""
    publish: str | None = None
    """Hub repository (`hf://organisation/name`) that the promoted policy is published to; private when it is new. The token
    comes from `HF_TOKEN` or `hf auth login`. Default: not published."""

    @field_validator("publish")
    @classmethod
    def _is_repository(cls, publish: str | None) -> str | None:
        if publish is not None and not re.fullmatch(REPOSITORY, publish):
            raise ValueError(f"{publish!r} is not a Hub repository: write hf://organisation/name")
        return publish
