"""Length penalties of episodes: over the tokens that `max_completion_length` counts, observations included.

20 tokens, a buffer of 8 and DAPO's penalty: (used - (20 - 8)) / 8, between 0 and 1 (Yu et al. 2025, equation 13). verl's
reward manager and TRL's `get_soft_overlong_punishment` count the whole response, too: the attention mask behind the prompt, and
the completion ids with the tools' answers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alignment_core.data.completion_text import CompletionText
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.inference.completions import Completion
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.rl import EnvironmentConfig, RlConfig
from alignment_core.rollout.rollout import Rollout
from alignment_core.stages.rl.loop import Loop
from alignment_core.stages.rl.rewards import Rewards

SOURCE = """
class Talks:
    def __init__(self, observation):
        self.observation = observation
    def reset(self, prompt, label):
        return None
    def step(self, completion):
        return {"observation": self.observation, "reward": 0.0, "done": False}
"""
SHAPING = {"overlong_buffer": 8, "overlong_penalty": 1.0, "truncation_penalty": 0.25}


def say(episode: Episode, tokens: int, finish_reason: str = "stop") -> None:
    ids = np.full(tokens, ord("a"), np.int32)
    episode.append_turn(Completion(ids, np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), finish_reason))


def new_episode() -> Episode:
    prompt = {"prompt": "?", "label": None, "task": None, "source": "p:1", "prompt_ids": [63]}
    return Episode(0, 0, 0, prompt, most_tokens=20)


def penalty_of(*episodes: Episode) -> list[float | None]:
    """The totals of :class:`Rewards` for episodes with zero reward."""
    section = RlConfig.model_validate(
        {
            "prompts": "prompts.jsonl",
            "rewards": [{"verifier": "checks.py:right"}],
            "generation": {"max_completion_length": 20},
            "shaping": SHAPING,
        }
    )
    text = CompletionText(byte_tokenizer())
    rollouts = [replace(Rollout.of(episode, text, "policy"), rewards={"right": 0.0}) for episode in episodes]
    sources: Any = None  # the rewards are there already
    return [rollout.reward for rollout in Rewards(section, sources, Stopwatch(), cost={}).add_totals(rollouts)]


def test_observations_count_towards_the_length_as_in_the_budget() -> None:
    alone, conversation, short = new_episode(), new_episode(), new_episode()
    say(alone, 16)
    say(conversation, 4)
    conversation.append_observation([0] * 8)
    say(conversation, 4)
    say(short, 8)
    assert penalty_of(alone, conversation, short) == [-0.5, -0.5, 0]


def test_an_opening_longer_than_the_prompt_counts_towards_the_length_as_in_the_budget() -> None:
    episode = new_episode()
    episode.opening = [63] * 6  # five more than the prompt
    say(episode, 11)
    assert penalty_of(episode) == [-0.5]


def test_a_turn_that_an_agent_limited_is_not_truncated_at_the_maximum_length() -> None:
    limited, truncated, complete = new_episode(), new_episode(), new_episode()
    say(limited, 4, "length")
    say(truncated, 20, "length")
    say(complete, 20)
    assert penalty_of(limited, truncated, complete) == [0, -1.25, -1.0]
    rollouts = [
        Rollout.of(episode, CompletionText(byte_tokenizer()), "policy") for episode in (limited, truncated, complete)
    ]
    loop: Any = SimpleNamespace(context=SimpleNamespace(cost={}))
    assert Loop._lengths(loop, rollouts)["truncated"] == pytest.approx(1 / 3), "as the penalties have it"


@pytest.mark.parametrize(("turn", "observation"), [(6, "x" * 30), (19, "x"), (20, "x")])
def test_an_episode_whose_next_observation_does_not_fit_is_truncated_at_maximum_length(
    turn: int, observation: str, tmp_path: Path
) -> None:
    (tmp_path / "talks.py").write_text(SOURCE)
    options: dict[str, Any] = {"name": f"{tmp_path / 'talks.py'}:Talks", "options": {"observation": observation}}
    config = EnvironmentConfig.model_validate(options)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    environments = Environments(config, byte_tokenizer(template), processes=1, timeout=60)
    try:
        episode = new_episode()
        environments.answer_all([episode])
        say(episode, turn)
        environments.answer_all([episode])
    finally:
        environments.close()
    assert (episode.over, episode.finish_reason, episode.failure) == (True, "no room", None)
    assert penalty_of(episode) == [-1.25]
