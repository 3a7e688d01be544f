"""The order in which reinforcement learning draws prompts, and the requests for their episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.canonical import derive_seed
from alignment_core.environments.episode import Episode
from alignment_core.inference.completions import Request
from alignment_core.recipes.sections.rollout import GenerationConfig
from alignment_core.training.training_rows import epoch_order


@dataclass(frozen=True)
class PromptSchedule:
    """The prompts of a run. The completions of a prompt depend only on its index in the run, ``draw``, and the weights."""

    prompts: Sequence[dict[str, Any]]
    """Rows of a data set, with the paths of their images."""
    generation: GenerationConfig
    seed: int
    purpose: str = ""
    """Prefix of the names of episodes that are not for training."""
    shuffle: bool = True
    """Whether each epoch shuffles the prompts."""

    def episodes(self, draw: int) -> list[Episode]:
        """New episodes of the prompt with this index; an epoch draws each prompt once."""
        epoch, index = divmod(draw, len(self.prompts))
        number = epoch_order(len(self.prompts), self.seed, epoch, self.shuffle)[index]
        samples, most = range(self.generation.num_generations), self.generation.max_completion_length
        return [Episode(draw, sample, number, self.prompts[number], most, self.purpose) for sample in samples]

    def request(self, episode: Episode) -> Request:
        """The request for the policy's next turn of an episode."""
        seed = derive_seed(self.seed, "episode", episode.draw, episode.sample, len(episode.ids)) % 2**31
        most = min(episode.tokens_left, episode.most or episode.tokens_left)
        return Request(episode.name, [*episode.prompt_ids, *episode.ids.tolist()], most, seed, episode.images)
