"""Every documented verifier and reward with every kind of environment: a right answer is worth more than a wrong one.

Reward models read tokens of any origin: tests/stages/test_rl.py has them beside environments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.data.completion_text import CompletionText
from alignment_core.environments.environments import Environments
from alignment_core.environments.episode import Episode
from alignment_core.errors import DataError, Stopped
from alignment_core.inference.completions import Completion
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.base import Opening
from alignment_core.rewards.results import numbers
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.rollout import Rollout
from tests.rewards.reward_server import Server

SOURCE = """
import signal

import httpx


def right(prompt, completion, label):
    return completion.strip() == label

async def right_async(prompt, completion, label):
    return right(prompt, completion, label)

def right_in_time(prompt, completion, label):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # as libraries do that limit their own time: main thread only
    signal.alarm(30)
    try:
        return right(prompt, completion, label)
    finally:
        signal.alarm(0)

def group(rows):
    return [float(row["completion"].strip() == row["label"]) for row in rows]

async def group_async(rows):
    return group(rows)

class TwoTurns:
    def reset(self, prompt, label):
        self.label, self.turns = label, 0

    def step(self, completion):
        self.turns += 1
        if self.turns == 1:
            return {"observation": "Well?"}
        return {"reward": float(completion.strip() == self.label), "done": True}

async def agent(prompt, label, base_url, api_key):
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as client:
        messages = [{"role": "user", "content": prompt}]
        answer = await client.post("/chat/completions", json={"model": "policy", "messages": messages}, timeout=60)
        return float(answer.json()["choices"][0]["message"]["content"].strip() == label)
"""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = "alignment_core.environments.tools:Tools"
RIGHT, WRONG = " 3", " 4"
LABELLED: dict[str, tuple[str, str, str]] = {
    # the label, an answer that is worth 1, and one that is worth 0
    "task": ("3", RIGHT, WRONG),
    "math": ("1/2", r"so \boxed{0.5}", r"so \boxed{2}"),
    "code": (
        json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]}),
        "```python\nprint(2 * int(input()))\n```",
        "```python\nprint(int(input()))\n```",
    ),
    "reasoning_gym": ("", "", ""),  # by the library's definition
    "right": ("3", RIGHT, WRONG),
    "right_async": ("3", RIGHT, WRONG),
    "right_in_time": ("3", RIGHT, WRONG),
}
ENVIRONMENTS = ("none", "class", "tools", "agent")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def environments(file: Path) -> Iterator[Callable[..., Environments | None]]:
    """Of each kind one, but for tools: one for each verifier."""
    with ExitStack() as stack:
        known: dict[tuple[str, str], Environments] = {}

        def of_kind(kind: str, verifier: str) -> Environments | None:
            configs: dict[str, dict[str, Any]] = {
                "class": {"name": f"{file}:TwoTurns"},
                "tools": {"name": TOOLS, "options": {"tools": [], "verifier": verifier}, "role": "tool"},
                "agent": {"agent": f"{file}:agent"},
            }
            if kind == "none":
                return None
            key = (kind, verifier if kind == "tools" else "")
            if key not in known:
                config = EnvironmentConfig.model_validate(configs[kind])
                known[key] = Environments(config, byte_tokenizer(TEMPLATE), processes=1, timeout=60)
                stack.callback(known[key].close)
            return known[key]

        yield of_kind


def labelled(verifier: str) -> tuple[str, str, str]:
    if verifier != "reasoning_gym":
        return LABELLED[verifier]
    needed = "the extra `environments` is not in `.venv`: `make peers` runs this"
    pytest.importorskip("reasoning_gym", reason=needed)
    from alignment_core.data.origins import reasoning_gym

    (row,) = reasoning_gym.rows("leg_counting", "train", 1, 0, {})
    label = str(row["label"])
    return label, f"<answer>{json.loads(label)['entry']['answer']}</answer>", "<answer>-1</answer>"


def rows_of(kind: str, environment: Environments | None, label: str, *answers: str) -> list[dict[str, Any]]:
    """Rows of episodes that end with these answers, as the stage has them."""
    tokenizer = byte_tokenizer(TEMPLATE)
    prompt = {"prompt": "1+2?", "label": label, "task": "reverse", "source": "p.jsonl:1"}
    prompt["prompt_ids"] = tokenizer("1+2?")["input_ids"]
    episodes = [Episode(0, number, 0, prompt, most_tokens=1000) for number in range(len(answers))]

    def say(texts: tuple[str, ...]) -> None:
        for episode, text in zip(episodes, texts, strict=True):
            ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
            episode.append_turn(Completion(ids, np.zeros(len(ids)), np.zeros(len(ids)), "stop"))
        if environment:
            environment.answer_all(episodes)

    if environment:
        environment.answer_all(episodes)
    if kind == "class":
        say(("",) * len(answers))
    say(answers)
    assert all(episode.over for episode in episodes) == (environment is not None)
    return [Rollout.of(episode, CompletionText(tokenizer), "policy").row() for episode in episodes]


def rewarded(configs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[list[float | None]]:
    opening = Opening("rl.rewards", ResourcesConfig(reward_timeout_seconds=60), tokenizer=byte_tokenizer(TEMPLATE))
    with RewardSources([CHOICE.validate(config) for config in configs], opening) as sources:
        return [numbers(source) for source in sources(rows)]


@pytest.mark.parametrize("verifier", LABELLED)
def test_every_verifier_scores_with_every_environment(verifier: str, file: Path, environments: Any) -> None:
    label, right, wrong = labelled(verifier)
    name = f"{file}:{verifier}" if verifier.startswith("right") else verifier
    rows = {kind: rows_of(kind, environments(kind, name), label, right, wrong) for kind in ENVIRONMENTS}
    (scores,) = rewarded([{"verifier": name}], [row for of_kind in rows.values() for row in of_kind])
    assert scores == [1.0, 0.0] * len(ENVIRONMENTS)
    (own,) = rewarded([{"environment": True}], rows["tools"])
    assert own == [1.0, 0.0], "tools have the same verifier as a reward"


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_every_reward_is_given_beside_every_environment(kind: str, file: Path, environments: Any) -> None:
    rows = rows_of(kind, environments(kind, "task"), "3", RIGHT, WRONG)
    server = Server(
        lambda request: (200, json.dumps({"rewards": [float("3" in a) for a in request["completions"]]}).encode())
    )
    configs: list[dict[str, Any]] = [
        {"verifier": "task"},
        {"function": f"{file}:group"},
        {"function": f"{file}:group_async"},
        {"urls": server.url},
        *([{"environment": True}] if kind != "none" else []),
    ]
    assert rewarded(configs, rows) == [[1.0, 0.0]] * len(configs)
    server.end()


def test_a_verifier_of_tools_that_fails_costs_that_episode_alone(environments: Any) -> None:
    rows = [
        *rows_of("tools", environments("tools", "math"), "", "3"),
        *rows_of("tools", environments("tools", "math"), "3", "3"),
    ]
    with pytest.raises(DataError, match=r"the environment failed: ValueError: the label '' has no answer"):
        rewarded([{"environment": True, "max_failed": 0.0}], rows)
    assert rewarded([{"environment": True, "max_failed": 0.5}], rows) == [[None, 1.0]]


def test_closed_environments_start_no_verifier(file: Path) -> None:
    config = EnvironmentConfig(name=TOOLS, options={"tools": [], "verifier": "math"}, role="tool")
    environments = Environments(config, byte_tokenizer(TEMPLATE), processes=1, timeout=60)
    environments.close()
    with pytest.raises(Stopped, match="the environments were closed"):
        environments._verifier(0, "math")
