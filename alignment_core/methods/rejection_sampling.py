"""The method ``rejection-sampling``: rounds of sample, judge, keep the best, fine-tune.

With `stop`, the composition waits for the gain of a round before it submits the next one. The gain is the result of a stage,
so a resumed run decides alike. A plan has all rounds that may still run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from alignment_core.composition import steps
from alignment_core.composition.base_model import base_and_start, reward_model, rewards
from alignment_core.composition.evaluations import Evaluations
from alignment_core.composition.graph import Input, Step, metrics
from alignment_core.composition.results import Outputs
from alignment_core.composition.steps import Rewards
from alignment_core.init import sections
from alignment_core.init.base import Profile
from alignment_core.methods.iterative_dpo import check_rounds
from alignment_core.recipes.methods import Init, Method
from alignment_core.recipes.recipe import GIVEN_BY, BaseRecipe
from alignment_core.recipes.sections.rejection_sampling import FIELD, RejectionSamplingConfig
from alignment_core.recipes.sections.training import RewardModelConfig, SftConfig


class RejectionSamplingRecipe(BaseRecipe):
    """SFT → reward model → rounds of generate, score, keep the best, fine-tune → evaluation → promotion."""

    SAMPLES: ClassVar[bool] = True
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
    def gain_metric(self) -> str | None:
        """Metric of the held-out evaluation that a round should improve; None: the score of the rounds' own samples."""
        section, evaluation = self.rejection_sampling, self.evaluation
        own, other = ("accuracy", "reward") if section.selection.score == "verifier" else ("reward", "accuracy")
        metric = section.stop.metric if section.stop else None
        names = (metric,) if metric else (own, other)
        return next((name for name in names if evaluation and self._measures(evaluation, name)), None)

    @property
    def sees_gains(self) -> bool:
        """Whether the policies of two rounds can be compared: normalised rewards of their own samples cannot."""
        return self.gain_metric is not None or all(
            reward.normalise == "none" for reward in self.rejection_sampling.rewards
        )

    @model_validator(mode="after")
    def _section_fits(self) -> RejectionSamplingRecipe:
        check_rounds(self, self.reward_model, self.rejection_sampling, FIELD)
        section = self.rejection_sampling
        if section.stop is None or self.gain_metric is not None:
            return self
        metric = section.stop.metric
        if metric and (self.evaluation or metric != "reward"):
            raise ValueError(f"`{FIELD}.stop.metric`: nothing measures {metric!r}: add {GIVEN_BY[metric]}")
        if not self.sees_gains:
            raise ValueError(
                f"`{FIELD}.stop` cannot compare the normalised rewards of two rounds: add an `evaluation`, or remove "
                f"`normalise` from `{FIELD}.rewards`"
            )
        return self


def compose(recipe: RejectionSamplingRecipe) -> Outputs:
    """Compose the whole recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    judge = reward_model(recipe.reward_model, base, start)
    section = recipe.rejection_sampling
    prompts = steps.dataset("rejection-sampling/prompts", section.prompts, "prompts", base)
    ranked_by = rewards("rejection_sampling.rewards", section.rewards, judge, "rejection-sampling")
    evaluations = Evaluations(recipe, base, judge)

    rounds = Rounds(recipe, prompts, ranked_by, evaluations, {"sft" if recipe.sft else "start": start})
    result = rounds.run()
    rounds.evaluate()
    return Outputs(
        policy=rounds.policies[result],
        reward_model=judge,
        report=evaluations.report(),
        final=result,
        baseline=evaluations.baseline[0] if evaluations.baseline else None,
        evaluations=evaluations,
    )


@dataclass
class Rounds:
    """The rounds of a recipe that were submitted so far."""

    recipe: RejectionSamplingRecipe
    prompts: Input
    ranked_by: Rewards
    evaluations: Evaluations
    policies: dict[str, Input]
    """The policy before the first round, and that of each round, by label."""
    kept: list[Step] = field(default_factory=list)
    """The rows that each round trains on."""

    def run(self) -> str:
        """Submit rounds until one brings no gain; the label of the resulting policy."""
        section = self.recipe.rejection_sampling
        held_out = self.recipe.gain_metric is not None
        self.evaluations.compare_prompts()  # now, because a large overlap ends the run while it waits for a round
        for number in range(1, section.rounds + 1):
            label = f"round-{number}"
            self.kept.append(self._keep(label, number))
            if section.stop and (not held_out or self._nothing_new()) and (best := self._best_if_over(label)):
                return best
            learner = self.newest if section.start_from == "previous" else next(iter(self.policies.values()))
            self.policies[label] = steps.sft(f"{label}/sft", section.training, learner, self.kept[-1], label)
            if section.stop and held_out and (best := self._best_if_over(label)):
                return best
        if not section.stop and self.recipe.sees_gains:
            self._gain(label)
        return label

    @property
    def newest(self) -> Input:
        """The policy of the last round."""
        return list(self.policies.values())[-1]

    def evaluate(self) -> None:
        """Evaluate the policies that are not evaluated yet; submitted late, so that the rounds get the machines first."""
        for label, policy in self.policies.items():
            if label not in self.evaluations.steps:
                self.evaluations.add(label, policy)

    def _keep(self, label: str, number: int) -> Step:
        """Sample from the newest policy, judge, and keep the best."""
        section, count = self.recipe.rejection_sampling, self.recipe.rejection_sampling.prompts_per_round
        verifying = self.recipe.evaluation if section.selection.score == "verifier" else None
        first = (number - 1) * count
        samples = steps.generate(f"{label}/sample", section.generation, self.newest, self.prompts, first, count, label)
        scores = steps.score(f"{label}/judge", samples, self.newest, self.ranked_by, verifying)
        earlier = self.kept[-1] if self.kept and section.keep_earlier else None
        may_be_empty = section.stop is not None and number > 1
        return steps.select_best(f"{label}/best", section.selection, samples, scores, earlier, may_be_empty)

    def _nothing_new(self) -> bool:
        selected = metrics(self.kept[-1])
        return selected is not None and not selected["new"]

    def _best_if_over(self, label: str) -> str | None:
        """The label of the best policy if no other round should run; None if one should, or if that is not known yet."""
        gain = metrics(self._gain(label))
        return str(gain["result"]) if gain and "stops" in gain else None

    def _gain(self, label: str) -> Step:
        section, metric = self.recipe.rejection_sampling, self.recipe.gain_metric
        if metric is not None:
            self.evaluate()
        min_gain = section.stop.min_gain if section.stop else None
        policies, evaluations = list(self.policies), self.evaluations.steps
        return steps.gain(f"{label}/gain", section.rounds, self.kept, policies, evaluations, metric, min_gain)


def init_sections(profile: Profile) -> dict[str, Any]:
    """A first recipe from prompts with an answer that a verifier compares with, or from pairs by a reward model."""
    return sections.rounds(profile, "rejection-sampling", (1e-5, 1e-3), {"min_score": 1})


METHOD = Method(
    RejectionSamplingRecipe,
    compose,
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
    init=Init(
        kinds=("preferences", "prompts"), sections=init_sections, why="prompts, and what says which answers are better"
    ),
)
