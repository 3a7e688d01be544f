"""SFT → reward model → rounds of sample, judge, keep the best, fine-tune → evaluation.

With `stop`, the composition waits for what a round has gained before it submits the next one. The gain is a stage's
result, so a run that resumes decides alike. A plan has all rounds that are not known to be left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alignment.flows.base_model_stages import base_and_start, reward_model, rewards
from alignment.flows.evaluation import Evaluations
from alignment.flows.results import Outputs
from alignment.tasks import data, rejection, rollout, training
from alignment.tasks.graph import Input, Step, metrics
from alignment.tasks.rollout import Rewards
from alignment_core.recipes.methods.rejection_sampling import RejectionSamplingRecipe


def rejection_sampling(recipe: RejectionSamplingRecipe) -> Outputs:
    """Compose the whole recipe."""
    base, start = base_and_start(recipe, recipe.sft)
    judge = reward_model(recipe, recipe.reward_model, base, start)
    section = recipe.rejection_sampling
    prompts = data.dataset("rejection-sampling/prompts", section.prompts, "prompts", base)
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
    """The rounds of a recipe, as far as they are submitted."""

    recipe: RejectionSamplingRecipe
    prompts: Input
    ranked_by: Rewards
    evaluations: Evaluations
    policies: dict[str, Input]
    """The policy before the first round, and the one that each round ends with, by label."""
    kept: list[Step] = field(default_factory=list)
    """The rows that each round trains on."""

    def run(self) -> str:
        """Submit round by round until one should not be; the label of the result."""
        section, held_out = self.recipe.rejection_sampling, self.recipe.gain_metric is not None
        self.evaluations.compare_prompts()  # now: where it is too large, this ends the run while it waits for a round
        for number in range(1, section.rounds + 1):
            label = f"round-{number}"
            self.kept.append(self._keep(label, number))
            if section.stop and (not held_out or self._nothing_new()) and (best := self._best_if_over(label)):
                return best
            learner = self.newest if section.start_from == "previous" else next(iter(self.policies.values()))
            self.policies[label] = training.sft(f"{label}/sft", section.training, learner, self.kept[-1], label)
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
        """Evaluate the policies that are not evaluated yet, once the rounds have the machines that they need."""
        for label, policy in self.policies.items():
            if label not in self.evaluations.steps:
                self.evaluations.add(label, policy)

    def _keep(self, label: str, number: int) -> Step:
        """Sample from the newest policy, judge, and keep the best."""
        section, count = self.recipe.rejection_sampling, self.recipe.rejection_sampling.prompts_per_round
        verifying = self.recipe.evaluation if section.selection.score == "verifier" else None
        first = (number - 1) * count
        samples = rollout.generate(
            f"{label}/sample", section.generation, self.newest, self.prompts, first, count, label
        )
        scores = rollout.score(f"{label}/judge", samples, self.newest, self.ranked_by, verifying)
        earlier = self.kept[-1] if self.kept and section.keep_earlier else None
        may_be_empty = section.stop is not None and number > 1
        return rejection.select_best(f"{label}/best", section.selection, samples, scores, earlier, may_be_empty)

    def _nothing_new(self) -> bool:
        found = metrics(self.kept[-1])
        return found is not None and not found["new"]

    def _best_if_over(self, label: str) -> str | None:
        """The label of the best policy if no other round should run; None if one should, or if nobody knows yet."""
        found = metrics(self._gain(label))
        return str(found["result"]) if found and "stops" in found else None

    def _gain(self, label: str) -> Step:
        section, metric = self.recipe.rejection_sampling, self.recipe.gain_metric
        if metric is not None:
            self.evaluate()
        min_gain = section.stop.min_gain if section.stop else None
        steps = self.evaluations.steps
        return rejection.gain(f"{label}/gain", section.rounds, self.kept, list(self.policies), steps, metric, min_gain)
