"""Counts of failed rewards in the checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment_core.errors import DataError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.rewards.base import Opening
from alignment_core.rewards.sources import RewardSources
from alignment_core.stages.rl.loop import Loop

REWARD = """
def group(rows):
    return [None if row["completion"] == "bad" else 1.0 for row in rows]
"""


def opened(file: Path) -> RewardSources:
    """A reward that may be missing for 2 of the 8 completions of a step."""
    config = CHOICE.validate({"function": f"{file}:group", "max_failed": 0.25})
    resources = ResourcesConfig(reward_timeout_seconds=20, reward_processes=1)
    return RewardSources([config], Opening("rl.rewards", resources, tokenizer=byte_tokenizer()), step=8)


def loop(sources: RewardSources, pending: list[int]) -> Loop:
    """A loop whose rewards are real; the rest of its state is plain values, because it takes no step."""
    result = object.__new__(Loop)
    plain: dict[str, Any] = {"state": [], "restore": lambda _: None}
    result.sampler = SimpleNamespace(**{**plain, "state": {"drawn": 4, "pending": pending}})  # type: ignore[assignment]
    result.rewards = SimpleNamespace(**plain, sources=sources)  # type: ignore[assignment]
    result.values = SimpleNamespace(**plain)  # type: ignore[assignment]
    result.kl_coefficient = 0.0
    result.best = None
    return result


def rows(failed: int) -> list[dict[str, Any]]:
    """Four completions, of which so many have no reward."""
    texts = ["bad"] * failed + ["good"] * (4 - failed)
    return [
        {
            "source": f"p.jsonl:{number}",
            "group": number,
            "prompt": number,
            "prompt_text": "?",
            "prompt_ids": [63],
            "label": None,
            "task": None,
            "messages": None,
            "columns": None,
            "completion_text": text,
            "completion_ids": [*text.encode()],
            "mask": [True] * len(text),
            "finish_reason": "stop",
        }
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("pending", [[], [2, 3]], ids=["nothing pending", "draws that are rewarded again"])
def test_a_resumed_run_remembers_the_rewards_that_failed_but_not_those_of_draws_that_are_sampled_again(
    pending: list[int], tmp_path: Path
) -> None:
    """By hand: 2 failures before the checkpoint and 1 after it are 3 of 8, and 2 are allowed. Pending draws are rewarded once
    more, so that their failures would count twice."""
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    with opened(file) as sources:
        sources(rows(failed=2))
        state = json.loads(json.dumps(loop(sources, pending)._state()))
    with opened(file) as sources:
        loop(sources, pending)._restore(state)
        if pending:
            sources(rows(failed=1))
        else:
            with pytest.raises(DataError, match="2 of 8 completions may lack a reward"):
                sources(rows(failed=1))
