"""One sampled completion, as it goes from the sampler over its rewards to training and the trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.data.completion_text import CompletionText, Texts
from alignment_core.environments.episode import Episode, version_of
from alignment_core.models.microbatch import Images, Tokens
from alignment_core.rewards.results import RewardResult, reasons
from alignment_core.training.step_data import StepData
from alignment_core.user_code.errors import Failed, Reason


@dataclass(frozen=True)
class Rollout:
    """One completion of a prompt: T tokens, which are the policy's turns and the observations between them."""

    prompt: int
    """Row of the prompt in its data set."""
    group: int
    """Index of the prompt among all that the run draws; the completions of a group answer the same prompt."""
    sample: int
    """Number of the completion within its group."""
    prompt_ids: Tokens
    completion_ids: np.ndarray
    """[T]"""
    loss_mask: np.ndarray
    """[T] Whether the policy sampled the token; observations are not trained on."""
    logps: np.ndarray
    """[T] Log-probabilities under the sampling distribution, in nats; 0 for observations."""
    versions: np.ndarray
    """[T] Number of training steps of the policy that sampled the token; −1 for observations."""
    finish_reason: str
    tokens_left: int
    """Tokens of ``max_completion_length`` that were not used."""
    prompt_text: str
    completion_text: str
    label: str | None
    task: str | None
    messages: str | None
    """JSON, as are ``tools`` and ``columns``; see :class:`alignment_core.data.kinds.prompts.Prompts`."""
    tools: str | None
    columns: str | None
    source: str
    """File and line of the prompt."""
    policy: str
    """Name of the newest policy that sampled one of the tokens."""
    special_text: str | None = None
    """``completion_text`` with special tokens, if a reward reads them and it was decoded where it was sampled."""
    images: tuple[Path, ...] = ()
    """Paths of the images of the prompt and of observations, in the order of their tokens."""
    environment: float | Failed = 0.0
    """Reward from the environment, or why there is none."""
    rewards: Mapping[str, RewardResult] = field(default_factory=dict)
    """Result of each reward, by its name, in the recipe's order; empty before the completion is rewarded."""
    used: bool = False
    """Whether the completion is trained on."""
    reward: float | None = None
    """The total reward; None if the completion is not trained on."""
    masked: bool = False
    """Whether its tokens have no loss; its reward is then part of its group's statistics alone."""

    @classmethod
    def of(cls, episode: Episode, text: CompletionText, policy: str) -> Rollout:
        """An episode that is over, before any reward. ``policy`` is the name of the policy before the first step."""
        prompt = episode.prompt
        texts = episode.texts or Texts(text(episode.ids, episode.finish_reason, episode.mask))
        return cls(
            prompt=episode.number,
            group=episode.draw,
            sample=episode.sample,
            prompt_ids=episode.prompt_ids,
            completion_ids=episode.ids,
            loss_mask=episode.mask,
            logps=episode.logps,
            versions=episode.versions,
            finish_reason=episode.finish_reason,
            tokens_left=episode.tokens_left,
            prompt_text=prompt["prompt"],
            completion_text=texts.plain,
            special_text=texts.special,
            label=prompt["label"],
            task=prompt["task"],
            messages=prompt.get("messages"),
            tools=prompt.get("tools"),
            columns=prompt.get("columns"),
            source=prompt["source"],
            policy=version_of(policy, int(episode.versions.max(initial=0))),
            images=episode.images,
            environment=episode.failure or episode.reward,
        )

    @property
    def failures(self) -> list[Reason | None] | None:
        """Why the rewards are missing, one reason for each reward; None if the completion is rewarded."""
        return reasons(list(self.rewards.values()))

    @property
    def truncated(self) -> bool:
        """Whether it ended because no tokens were left."""
        return self.tokens_left == 0 and self.finish_reason != "stop"

    @property
    def trained_mask(self) -> np.ndarray:
        """[T] Whether the token is trained."""
        return np.zeros_like(self.loss_mask) if self.masked else self.loss_mask

    def row(self) -> dict[str, Any]:
        """The completion as rewards read it, see :data:`alignment_core.rewards.base.Rows`."""
        return {"mask" if name == "loss_mask" else name: getattr(self, name) for name in _SEEN_BY_REWARDS}


_SEEN_BY_REWARDS = [
    column.name for column in fields(Rollout) if column.name not in ("rewards", "used", "reward", "masked")
]


def to_batch(rollouts: Sequence[Rollout]) -> StepData:
    """The columns that training computes on."""
    batch = StepData.of(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.completion_ids for rollout in rollouts],
        [rollout.trained_mask for rollout in rollouts],
        [rollout.group for rollout in rollouts],
        [Images(rollout.images) for rollout in rollouts] if any(rollout.images for rollout in rollouts) else (),
    )
    logps_T = np.concatenate([np.asarray(rollout.logps, np.float32) for rollout in rollouts])
    batch.numbers["rollout_logps"] = logps_T[np.concatenate([rollout.trained_mask for rollout in rollouts])]
    return batch
