"""Tasks that sample, score and pair completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignment.tasks.graph import Input, Step, submit
from alignment_core.recipes import EvaluationConfig, GenerationConfig, SelectionConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.stages.generate import GenerateConfig
from alignment_core.stages.score import ScoreConfig
from alignment_core.stages.select_pairs import SelectPairsConfig


@dataclass(frozen=True)
class Rewards:
    """A list of rewards as a stage takes it."""

    field: str
    """Where the recipe has the list."""
    configs: tuple[RewardConfig, ...]
    models: Mapping[str, Input]
    """The reward models that they need, by the stage's input: ``reward-<number in the list>``."""


def generate(
    label: str,
    generation: GenerationConfig,
    policy: Input,
    prompts: Input,
    first_prompt: int = 0,
    count: int | None = None,
    stream: str = "",
    after: Step | None = None,
) -> Step:
    """Sample completions of ``count`` prompts from number ``first_prompt`` on, when ``after`` is done; calls of one ``stream``
    share their noise."""
    config = GenerateConfig(generation=generation, first_prompt=first_prompt, prompts=count)
    return submit("generate", label, config, {"policy": policy, "prompts": prompts}, stream, after=after)


def score(
    label: str,
    rollouts: Input,
    policy: Input,
    rewards: Rewards,
    verifying: EvaluationConfig | None = None,
    reference: Input | None = None,
) -> Step:
    """Score completions by everything that is given; ``policy`` has made them. ``verifying`` names the verifier, and the
    temperature and lengths at which they were sampled, which are those of the ``reference``, too."""
    config = ScoreConfig(rewards=rewards.configs, field=rewards.field)
    if verifying is not None:
        rules: dict[str, Any] = {
            name: getattr(verifying, name) for name in ("verifier", "max_failed_rewards", "skip_special_tokens")
        }
        if reference is not None:
            rules["temperature"] = verifying.generation.temperature
            rules["max_completion_length"] = verifying.generation.max_completion_length
        config = config.model_copy(update=rules)
    tokenizer = policy if rewards.configs or not config.skip_special_tokens else None
    inputs = {"rollouts": rollouts, "tokenizer": tokenizer, "reference": reference, **rewards.models}
    return submit("score", label, config, inputs)


def select_pairs(label: str, selection: SelectionConfig, rollouts: Input, scores: Input, stream: str = "") -> Step:
    """Make preference pairs of scored completions."""
    config = SelectPairsConfig(selection=selection)
    return submit("select_pairs", label, config, {"rollouts": rollouts, "scores": scores}, stream)
