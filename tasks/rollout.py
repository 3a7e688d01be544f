"""Tasks that sample, score and pair completions."""

from __future__ import annotations

from alignment_core.recipes import EvaluationConfig, GenerationConfig, SelectionConfig
from alignment_core.stages.generate import GenerateConfig
from alignment_core.stages.score import ScoreConfig
from alignment_core.stages.select_pairs import SelectPairsConfig
from tasks.graph import Input, Step, submit


def generate(
    label: str,
    generation: GenerationConfig,
    policy: Input,
    prompts: Input,
    first_prompt: int = 0,
    count: int | None = None,
    stream: str = "",
) -> Step:
    """Sample completions of ``count`` prompts from number ``first_prompt`` on; calls of one ``stream`` share their noise."""
    config = GenerateConfig(generation=generation, first_prompt=first_prompt, prompts=count)
    return submit("generate", label, config, {"policy": policy, "prompts": prompts}, stream)


def score(
    label: str,
    rollouts: Input,
    reward_model: Input | None,
    verifying: EvaluationConfig | None,
    reference: Input | None = None,
) -> Step:
    """Score completions by everything that is given; ``verifying`` names the verifier and how often it may fail."""
    config = ScoreConfig()
    if verifying is not None:
        rules = {"verifier": verifying.verifier, "max_failed_rewards": verifying.max_failed_rewards}
        config = config.model_copy(update=rules)
    return submit("score", label, config, {"rollouts": rollouts, "reward_model": reward_model, "reference": reference})


def select_pairs(label: str, selection: SelectionConfig, rollouts: Input, scores: Input, stream: str = "") -> Step:
    """Make preference pairs of scored completions."""
    config = SelectPairsConfig(selection=selection)
    return submit("select_pairs", label, config, {"rollouts": rollouts, "scores": scores}, stream)
