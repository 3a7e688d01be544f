"""Evaluation of the policies of a run on the same held-out prompts; the first policy is the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.composition import steps
from alignment_core.composition.base_model import rewards
from alignment_core.composition.branches import independent
from alignment_core.composition.graph import BranchFailed, Input, Step, current, failure, metrics
from alignment_core.composition.results import Outputs
from alignment_core.composition.steps import Rewards
from alignment_core.errors import UserError
from alignment_core.recipes import BaseRecipe, DataConfig, EvaluationConfig

STREAM = "evaluation"
"""Random stream of evaluations: the same noise for all policies makes their comparison more precise."""
PRODUCTION = "production"
"""Label of the policy that a promotion's tag points to."""


class Evaluations:
    """Collects policies to evaluate; the first that is added is the baseline and the reference of the KL. The metric
    ``kl_to_model`` of all others is the KL to ``origin``, if it is given. Held-out prompts are compared with the data sets
    ``trained_before``, too, which have names of their own."""

    def __init__(
        self,
        recipe: BaseRecipe,
        tokenizer: Input,
        reward_model: Input | None = None,
        process_reward_model: Input | None = None,
        origin: Input | None = None,
        trained_before: Mapping[str, Input] = {},
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.origin = origin
        self.trained_before = trained_before
        self.section = recipe.evaluation
        self.reward_model = reward_model
        self.baseline: tuple[str, Input, Step] | None = None
        self.steps: dict[str, Step] = {}
        self.samples: dict[str, Step] = {}
        self.scores: dict[str, Step] = {}
        self.tasks: dict[str, Step] = {}
        self.overlap: Step | None = None
        self.judge: Input | None = None
        if self.section:
            if self.section.judge and self.section.judge.served_judge:
                self.judge = steps.base_model("evaluation/judge-model", self.section.judge.served_judge)
            # Normalised by its own completions, every policy would have the same mean.
            listed = [reward.model_copy(update={"normalise": "none"}) for reward in self.section.rewards]
            self.rewards = rewards("evaluation.rewards", listed, reward_model, "evaluation", process_reward_model)
            self.prompts = self.dataset("evaluation/prompts", self.section.prompts)

    def dataset(self, label: str, prompts: DataConfig) -> Step:
        """Held-out prompts: the same rows for branches with different seeds, which are compared by them."""
        return steps.dataset(label, prompts, "prompts", self.tokenizer, stream=STREAM, held_out=True, common_seed=True)

    def add(self, label: str, policy: Input, after: Step | None = None, prompts: Input | None = None) -> None:
        """Sample, score and measure ``policy``, once the stage ``after`` is done, which needs the engines first.

        ``prompts`` replace the held-out prompts for this policy.
        """
        if self.section is None:
            return
        self._sample(self.section, label, policy, after, prompts)
        scores = self.scores[label] = self._score(self.section, label, policy)
        before = self.baseline[0] if self.baseline else None
        self.steps[label] = self._evaluate(self.section, f"{label}/evaluation", label, before)
        self.baseline = self.baseline or (label, policy, scores)

    def metrics(self, label: str) -> dict[str, Any]:
        """Metrics of the policy ``label``; waits for them. Raises UserError if it is not evaluated."""
        if label not in self.steps:
            raise UserError(f"{label!r} is not evaluated; there are {', '.join(self.steps) or 'no evaluations'}")
        return dict(metrics(self.steps[label]) or {})

    def _evaluate(self, section: EvaluationConfig, name: str, label: str, beside: str | None) -> Step:
        """Metrics of the policy ``label``, compared with those of ``beside``."""
        tasks = self.tasks.get(label)
        if beside is None:
            return steps.evaluate(name, section, self.scores[label], None, tasks=tasks, prompts=self.prompts)
        to_origin = self._score_to_origin(section, label)
        verdicts = None
        pair = self.samples[label], self.samples[beside]
        if section.judge:
            verdicts = steps.judge_pairs(f"{name}/judge", section.judge, *pair, self.judge)
        scores, others = self.scores[label], self.scores[beside]
        return steps.evaluate(name, section, scores, others, verdicts, tasks, to_origin, self.prompts, *pair)

    def _score_to_origin(self, section: EvaluationConfig, label: str) -> Step | None:
        """The scores of ``label`` with log-probabilities under the origin; None if these are not comparable."""
        if self.origin is None or self.baseline is None or not section.generation.samples_all_tokens:
            return None
        if self.origin is self.baseline[1]:
            return self.scores[label]
        unverified = section.model_copy(update={"verifier": None, "skip_special_tokens": True})
        nothing = Rewards("evaluation.rewards", (), {})
        name = f"{label}/evaluation/drift"
        return steps.score(name, self.samples[label], self.samples[label], nothing, unverified, self.origin)

    def _sample(
        self,
        section: EvaluationConfig,
        label: str,
        policy: Input,
        after: Step | None = None,
        prompts: Input | None = None,
    ) -> None:
        """Sample ``policy`` behind the held-out prompts, or ``prompts``, in its own chat template, unless the recipe sets one
        for all policies."""
        self.samples[label] = steps.generate(
            f"{label}/evaluation/generate",
            section.generation,
            policy,
            prompts or self.prompts,
            stream=STREAM,
            after=after,
            own_template=section.prompts.chat_template is None,
        )

    def _score(self, section: EvaluationConfig, label: str, policy: Input) -> Step:
        """Score the samples of ``policy``."""
        if section.lm_eval:
            self.tasks[label] = steps.lm_eval(f"{label}/evaluation/lm-eval", section.lm_eval, policy)
        reference = self.baseline[1] if self.baseline and section.generation.samples_all_tokens else None
        name, samples = f"{label}/evaluation/score", self.samples[label]
        return steps.score(name, samples, policy, self.rewards, section, reference, across_policies=True)

    def against(self, final: str, production: Reference) -> tuple[str, Step | None]:
        """Evaluate ``production`` on the same prompts, and compare the policy ``final`` with it.

        Returns the label of this comparison in the report, and the report of all policies with it. Raises BranchFailed if
        ``production`` cannot be sampled on these prompts; waits for its samples.
        """
        assert self.section is not None, "gates need an evaluation"
        with independent():
            self._sample(self.section, PRODUCTION, production)
        if failed := failure((self.samples[PRODUCTION],)):
            raise failed
        self.scores[PRODUCTION] = self._score(self.section, PRODUCTION, production)
        self.steps[PRODUCTION] = self._evaluate(self.section, f"{PRODUCTION}/evaluation", PRODUCTION, None)
        label = f"{final} against {PRODUCTION}"
        name = f"{final}/evaluation/against-{PRODUCTION}"
        self.steps[label] = self._evaluate(self.section, name, final, PRODUCTION)
        return label, self.report("promotion/report", {label: PRODUCTION})

    def report(self, label: str = "report", against: Mapping[str, str] = {}) -> Step | None:
        """One table of all policies; ``against`` names policies that are compared with another one than the baseline."""
        if self.section is None or self.baseline is None:
            return None
        title = f"Run {self.recipe.name}"
        overlap = self.compare_prompts()
        assert overlap is not None, "there is a section"
        before, generation = self.baseline[0], self.section.generation
        return steps.report(label, title, self.steps, before, self.reward_model, overlap, against, generation)

    def outputs(self, policies: Mapping[str, Input], **others: Any) -> Outputs:
        """The outputs of a run whose result is the last of these policies, compared with the first; ``others`` are further
        outputs. Evaluates them all, if the recipe has an evaluation."""
        for label, policy in policies.items():
            self.add(label, policy)
        first, *_, last = policies
        return Outputs(
            policy=policies[last], report=self.report(), final=last, baseline=first, evaluations=self, **others
        )

    def leave_out_failed(self) -> dict[str, BranchFailed]:
        """Drop failed policies, and training data of failed stages, from the table and the comparison of prompts.

        Waits for all evaluations. Returns the failures by the labels of the policies.
        """
        failed = {label: error for label, step in self.steps.items() if (error := failure([step]))}
        self.steps = {label: step for label, step in self.steps.items() if label not in failed}
        trained = current().training_data
        for label in [label for label, step in trained.items() if failed and failure([step])]:
            del trained[label]
        return failed

    def compare_prompts(self) -> Step | None:
        """Compare the held-out prompts with all training data: call it once all of it is submitted."""
        if self.section is not None and self.overlap is None:
            promotion = self.recipe.promotion
            gated = promotion is not None and not all(gate.is_of_training for gate in promotion.gates)
            limit = self.section.max_overlap if gated else None
            earlier = self.trained_before
            self.overlap = steps.overlap("evaluation/overlap", "evaluation.prompts", self.prompts, limit, earlier)
        return self.overlap
