"""The method ``rejection-sampling``: rounds of generate, score, keep the best, fine-tune."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from alignment_core.recipes.method import Method
from alignment_core.recipes.methods.iterative_dpo import check_rounds
from alignment_core.recipes.recipe import GIVEN_BY, BaseRecipe
from alignment_core.recipes.sections.rejection_sampling import FIELD, RejectionSamplingConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class RejectionSamplingRecipe(BaseRecipe):
    """SFT → reward model → rounds of generate, score, keep the best, fine-tune → evaluation → promotion."""

    method: Literal["rejection-sampling"] = "rejection-sampling"
    """Rejection sampling (RAFT, ReST, Llama 2)."""
    sft: SftConfig | None = None
    """Fine-tune on demonstrations first. Default: start from `model` as it is."""
    reward_model: RewardModelConfig | None = None
    """The reward model; may be left out if `rejection_sampling.rewards` or `rejection_sampling.selection` name something
    else."""
    rejection_sampling: RejectionSamplingConfig
    """The rounds."""

    @property
    def samples(self) -> bool:
        """Every round does."""
        return True

    @property
    def gain_metric(self) -> str | None:
        """Metric of the held-out evaluation that a round should improve; None: the score of the rounds' own samples."""
        section, evaluation = self.rejection_sampling, self.evaluation
        own, other = ("accuracy", "reward") if section.selection.score == "verifier" else ("reward", "accuracy")
        asked = section.stop.metric if section.stop else None
        names = (asked,) if asked else (own, other)
        return next((name for name in names if evaluation and self._measures(evaluation, name)), None)

    @property
    def sees_gains(self) -> bool:
        """Whether the policies of two rounds can be compared: normalised rewards of their own samples cannot."""
        return self.gain_metric is not None or all(
            reward.normalise == "none" for reward in self.rejection_sampling.rewards
        )

    @model_validator(mode="after")
    def _has_a_judge(self) -> RejectionSamplingRecipe:
        check_rounds(self, self.reward_model, self.rejection_sampling, FIELD)
        return self

    @model_validator(mode="after")
    def _can_stop(self) -> RejectionSamplingRecipe:
        section = self.rejection_sampling
        if section.stop is None or self.gain_metric is not None:
            return self
        asked = section.stop.metric
        if asked and (self.evaluation or asked != "reward"):
            raise ValueError(f"`{FIELD}.stop.metric`: nothing measures {asked!r}: add {GIVEN_BY[asked]}")
        if not self.sees_gains:
            raise ValueError(
                f"`{FIELD}.stop` cannot compare the normalised rewards of two rounds: add an `evaluation`, or remove "
                f"`normalise` from `{FIELD}.rewards`"
            )
        return self


METHOD = Method(
    RejectionSamplingRecipe,
    composition="alignment.flows.rejection_sampling:rejection_sampling",
    aliases=("raft", "rest", "best-of-n"),
    decides={  # of rounds, too, but not those of iterative DPO: their labels are others
        "rejection-sampling/prompts": "rejection_sampling.prompts",
        r"rejection-sampling/reward-\d+:.*": "rejection_sampling.rewards",
        r"round-\d+/judge:rewards.*": "rejection_sampling.rewards",
        r"round-\d+/judge": "evaluation",
        r"round-\d+/sample:prompts": "rejection_sampling.prompts_per_round",
        r"round-\d+/sample:first_prompt": "the first prompt",
        r"round-\d+/gain:rounds": "rejection_sampling.rounds",
        r"round-\d+/gain:metric": "rejection_sampling.stop.metric",
        r"round-\d+/gain:min_gain": "rejection_sampling.stop.min_gain",
        r"round-\d+/gain:.*": "the rounds so far",
        r"round-\d+/best:may_be_empty": "rejection_sampling.stop",
        r"round-\d+/(sample|best|sft)": "rejection_sampling",
    },
)
