"""Sampling of completions, and selection of preference pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from alignment_core.recipes.base import Config, unkeyed
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.recipes.sections.preference import DpoLossConfig, with_learning_rate
from alignment_core.recipes.sections.rewards import Reward, RewardConfig, check_rewards
from alignment_core.recipes.sections.training import EVALUATION_FIELDS, TrainingConfig

LOWEST_TEMPERATURE = 0.01
"""The lowest temperature above 0 at which vLLM samples (``_MAX_TEMP`` of its ``sampling_params``)."""


class GenerationConfig(Config):
    """Sampling parameters, named as in vLLM and TRL."""

    FILLED_BY_PLACE: ClassVar = True

    num_generations: int = Field(4, ge=1)
    """Number of completions per prompt. Default in `rl`: 8, as in TRL 1.16's GRPO: the mean of few completions is a noisy
    baseline."""
    max_completion_length: int = Field(512, ge=1)
    """Maximum length of a completion in tokens. Default: as in TRL 1.16. A model that thinks before it answers needs 2,048 or
    more; completions that end here have no answer to reward."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature: 0 (greedy decoding), or 0.01 and above."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities sum to at least this value."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens. 0 means all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Exclude tokens whose probability is below this fraction of that of the most likely token."""
    stop: tuple[str, ...] = unkeyed(())
    """Texts that end a completion, or a turn of an episode, beside the end-of-turn tokens: vLLM's `stop` with
    `include_stop_str_in_output`. The completion keeps all tokens that were sampled, up to the one that completes the text, and
    all of them are trained on; no end-of-turn token follows them."""
    shard_size: int = Field(64, ge=1)
    """Prompts per shard. After a crash, sampling resumes at the last complete shard."""

    @field_validator("stop")
    @classmethod
    def _is_not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("an empty text would end every completion at once: leave it out")
        return stop

    @field_validator("temperature")
    @classmethod
    def _is_one_that_vllm_samples_at(cls, temperature: float) -> float:
        if 0 < temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"vLLM raises lower temperatures to {LOWEST_TEMPERATURE:g}: use at least {LOWEST_TEMPERATURE:g}, or 0 for "
                "greedy decoding"
            )
        return temperature

    @property
    def samples_all_tokens(self) -> bool:
        """Whether every token can be sampled: neither greedy decoding nor `top_p`, `top_k` or `min_p` excludes any. Only then
        are the completions samples of the distribution softmax(logits / temperature)."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and self.min_p == 0


class SelectionConfig(Config):
    """Selection of pairs of chosen and rejected completions."""

    strategy: Literal["best_worst", "best_random", "random_pair", "all_pairs"] = "best_worst"
    """Best and worst completion, best and a random other one, two random ones, or all pairs; the completion with the
    higher score is chosen. Identical completions are never paired, and no pair is repeated. If the best and the worst one
    are identical, the pair of different completions with the largest margin is used."""
    score: Literal["reward", "verifier"] = "reward"
    """Score that ranks completions: `reward`, the weighted sum of `iterative_dpo.rewards`, or `verifier`, the score of
    `evaluation.verifier`."""
    min_margin: float = Field(0.0, ge=0)
    """Minimum difference in score; completions with equal scores are never paired."""
    max_pairs_per_prompt: int = Field(1, ge=1)
    """With `all_pairs`: keep the pairs with the largest margins, at most this many per prompt."""
    truncated: Literal["drop", "keep"] = unkeyed("drop")
    """Drop or keep completions that were truncated at `max_completion_length`, before pairs are made. A truncated completion
    as the chosen one teaches the policy not to stop; as the rejected one it is often a good answer that was cut off."""

    @model_validator(mode="after")
    def _has_pairs_to_keep(self, info: ValidationInfo) -> SelectionConfig:
        if self.strategy != "all_pairs":
            self.refuse_unused(
                info, ("max_pairs_per_prompt",), f"with `strategy: {self.strategy}`, which makes one pair"
            )
        return self


class IterativeDpoConfig(Config):
    """Rounds of generate → score → select → train."""

    rounds: int = Field(2, ge=1)
    """Number of rounds."""
    prompts: DataConfig
    """Prompts to sample from. Every round takes the next slice; no prompt is repeated before all have been used."""
    prompts_per_round: int = Field(1024, ge=1)
    """Number of prompts in each round. The default suits a first look: for pretrained models take 10,000 or more (RLHFlow's
    rounds have 20,000), with a `generation.max_completion_length` that whole answers fit into (1,024 or more)."""
    generation: GenerationConfig = GenerationConfig()
    """Sampling parameters."""
    rewards: tuple[Reward, ...] = ()
    """Rewards of a completion, whose weighted sum ranks the completions of a prompt. Default: the reward model of the section
    `reward_model`, or the score that `selection.score` names."""
    selection: SelectionConfig = SelectionConfig()
    """Pair selection."""
    loss: DpoLossConfig = DpoLossConfig()
    """The preference loss."""
    training: TrainingConfig = TrainingConfig(learning_rate=1e-6, warmup_ratio=0.1)
    """Optimiser and schedule of one round."""
    reference: Literal["previous", "initial"] = "previous"
    """Reference policy of a round: the policy at the start of the round (`previous`), or before the first round (`initial`)."""

    @classmethod
    def section_defaults(cls, content: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
        """With the learning rate of the loss."""
        return with_learning_rate(super().section_defaults(content), content)

    @model_validator(mode="after")
    def _ranks_by_one_thing(self, info: ValidationInfo) -> IterativeDpoConfig:
        self.training.refuse_unused(
            info, EVALUATION_FIELDS, "in `iterative_dpo.training`: the pairs of a round hold out no rows"
        )
        check_ranking(self.rewards, self.selection.score, self.prompts, "iterative_dpo")
        if not self.loss.needs_reference:
            self.refuse_unused(info, ("reference",), "with a loss that needs no reference")
        self.loss.check_trained(with_lora=self.training.lora is not None)
        return self


def check_ranking(rewards: Sequence[RewardConfig], score: str, prompts: DataConfig, field: str) -> None:
    """Raise ValueError if the rewards of the section ``field`` cannot rank completions of its prompts, or contradict its
    ``selection.score``."""
    check_rewards(rewards, f"{field}.rewards", prompts, f"{field}.prompts")
    if rewards and score == "verifier":
        raise ValueError(
            f"`{field}.rewards` and `{field}.selection.score: verifier` both rank the "
            "completions: remove the latter, and add `{verifier: …}` to the list if the verifier should count"
        )
