"""Tasks that evaluate policies."""

from __future__ import annotations

from collections.abc import Mapping

from alignment.tasks.graph import Input, Step, submit
from alignment_core.recipes import EvaluationConfig, GenerationConfig
from alignment_core.recipes.sections.lm_eval import LmEvalConfig
from alignment_core.recipes.sections.pairwise_judge import PairwiseJudgeConfig
from alignment_core.stages.evaluate import EvaluateConfig
from alignment_core.stages.judge_pairs import JudgePairsConfig
from alignment_core.stages.lm_eval import pin_tasks
from alignment_core.stages.report import ReportConfig, decoding_sentence


def judge_pairs(
    label: str, judge: PairwiseJudgeConfig, rollouts: Input, baseline: Input, model: Input | None = None
) -> Step:
    """Have a language model compare completions with those of a baseline; ``model`` is one that the stage is to serve."""
    inputs = {"rollouts": rollouts, "baseline": baseline, "judge": model}
    return submit("judge_pairs", label, JudgePairsConfig(judge=judge), inputs)


def evaluate(
    label: str,
    section: EvaluationConfig,
    scores: Input,
    baseline_scores: Input | None,
    verdicts: Input | None = None,
    tasks: Input | None = None,
) -> Step:
    """Metrics of scored completions, beside a baseline's, with the ``verdicts`` of a judge and the results of lm-eval's
    ``tasks`` if there are any."""
    config = EvaluateConfig(**section.model_dump(include=set(EvaluateConfig.model_fields)))
    beside = {"baseline_scores": baseline_scores, "verdicts": verdicts, "lm_eval": tasks}
    return submit("evaluate", label, config, {"scores": scores, **beside})


def lm_eval(label: str, section: LmEvalConfig, policy: Input) -> Step:
    """Have the library lm-eval measure a policy."""
    return submit("lm_eval", label, pin_tasks(section), {"model": policy})


def report(
    label: str,
    title: str,
    evaluations: Mapping[str, Input],
    baseline: str,
    reward_model: Input | None,
    overlap: Input,
    against: Mapping[str, str],
    generation: GenerationConfig,
) -> Step:
    """All evaluations of a run in one table, by answers sampled as ``generation`` says; ``against`` names what a policy was
    compared with, if not with ``baseline``."""
    config = ReportConfig(
        title=title,
        policies=tuple(evaluations),
        baseline=baseline,
        against=dict(against),
        decoding=decoding_sentence(generation),
    )
    return submit("report", label, config, {**evaluations, "reward_model": reward_model, "overlap": overlap})
