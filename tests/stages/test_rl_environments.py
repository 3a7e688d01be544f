"""Environments: turns and observations as tokens, trained tokens, and failed episodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from alignment_core.errors import DataError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from tests.environments.test_agents import BARE
from tests.matrix import matrix
from tests.stages.conftest import RunRl
from tests.stages.rl_runs import GENERATIONS, RESOURCES, Section, prompts, rows_of, section_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 3
ENVIRONMENTS = '''
import asyncio, os, pathlib, signal, time


class Echo:
    """Tells the policy what it said, in capitals, and rewards it for the length of what it says then."""

    def __init__(self, turns=2):
        self.turns, self.completions = turns, []

    def reset(self, prompt, label):
        return f"[{prompt.removesuffix('<assistant>')[-2:]}]"

    async def step(self, completion):
        await asyncio.sleep(0.001)
        self.completions.append(completion)
        if len(self.completions) == self.turns:
            return {"reward": len(completion) / 10, "done": True}
        return {"observation": f"no: {len(completion)}", "reward": 0.5}


class Bad:
    """Every episode of the first prompt goes wrong, each in another way."""

    episodes = 0

    def reset(self, prompt, label):
        self.bad = "0+0" in prompt
        return None

    def step(self, completion):
        if not self.bad:
            return {"reward": 1.0, "done": True}
        Bad.episodes += 1
        if Bad.episodes % 4 == 1:
            raise ValueError("what was that?")
        if Bad.episodes % 4 == 2:
            time.sleep(60)
        if Bad.episodes % 4 == 3:
            return {"reward": float("nan"), "done": True}
        return "well done"


class Endless:
    def reset(self, prompt, label):
        return None

    def step(self, completion):
        return {"observation": ".", "reward": 0.25}


class Lingers(Echo):
    async def close(self):
        await asyncio.sleep(0.2)


class Crash(Endless):
    def step(self, completion):
        os._exit(3)


class Killed(Echo):
    """Its process is killed once, as if from outside, in the midst of the episodes of a step."""

    def __init__(self, marker):
        super().__init__(turns=3)
        self.marker = pathlib.Path(marker)

    async def step(self, completion):
        if len(self.completions) == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().step(completion)
'''

TOOLS = """
def dice():
    return "six"


def is_six(prompt, completion, label):
    return float(completion == "6")
"""

AGENT = '''
import httpx


async def agent(prompt, label, base_url, api_key):
    """As `Echo`, as an agent that sends the requests itself."""
    messages = [{"role": "system", "content": "Say it."}, {"role": "user", "content": prompt}]
    async with httpx.AsyncClient(headers={"Authorization": "Bearer " + api_key}, timeout=60) as client:
        for more in ({"max_tokens": 12}, {"temperature": 0.0}):
            answer = await client.post(base_url + "/chat/completions", json={"messages": messages, "model": "", **more})
            answer.raise_for_status()
            message = answer.json()["choices"][0]["message"]
            if not message["content"]:
                raise ValueError("the answer is empty")
            messages += [message, {"role": "user", "content": "no: %d" % len(message["content"])}]
    return len(message["content"]) / 10
'''


@pytest.fixture
def resources() -> ResourcesConfig:
    return RESOURCES.model_copy(update={"reward_timeout_seconds": 10.0})


@pytest.fixture
def section(tmp_path: Path) -> Section:
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    return section_of(
        STEPS,
        {"environment": True},
        {"max_completion_length": 200, "shard_size": 2},
        {"learning_rate": 1e-3, "adam_epsilon": 1e-5},
        environment={"name": f"{tmp_path / 'environments.py'}:Echo"},
    )


@pytest.mark.parametrize("staleness", matrix([0, 1], usual=[0]))
def test_observations_are_in_the_tokens_and_are_not_trained_on(staleness: int, section: Section, run: RunRl) -> None:
    section["execution"] = {"max_staleness": staleness}
    outputs, result = run(section)
    tokenizer = byte_tokenizer()
    ended = 0
    for row in rows_of(outputs):
        ids, mask = np.asarray(row["completion_ids"]), np.asarray(row["mask"])
        assert (np.asarray(row["versions"])[~mask] == -1).all()
        assert (np.asarray(row["versions"])[mask] >= 0).all()
        assert (np.asarray(row["rollout_logps"])[~mask] == 0).all()
        turns = np.split(ids, np.flatnonzero(np.diff(mask.astype(int))) + 1)
        policy_turns, observations = turns[0::2], turns[1::2]
        prompt = row["prompt_text"].removesuffix("<assistant>")
        assert tokenizer.decode(row["prompt_ids"]) == f"{prompt}<user>[{prompt[-2:]}]<assistant>", (
            "`reset` speaks first"
        )
        if row["finish_reason"] == "stop":
            ended += 1
            assert (len(policy_turns), len(observations)) == (2, 1)
            first = tokenizer.decode(policy_turns[0], skip_special_tokens=True)
            last = tokenizer.decode(policy_turns[1], skip_special_tokens=True)
            assert tokenizer.decode(observations[0]) == f"<user>no: {len(first)}<assistant>"
            assert row["rewards"] == pytest.approx([0.5 + len(last) / 10])
            assert row["completion_text"] == first + last
            assert policy_turns[0][-1] == policy_turns[1][-1] == tokenizer.eos_token_id
        else:
            assert len(ids) <= 200
        advantages = np.asarray(row["advantages"])
        assert (advantages[~mask] == 0).all()
    assert ended > 0
    assert result.metrics["mismatch"] < (1e-6 if staleness == 0 else 0.1), "the trainer reads what the engine read"


@pytest.mark.parametrize("staleness", matrix([0, 1], usual=[1]))
def test_an_agent_drives_the_policy_token_for_token(
    staleness: int, section: Section, tmp_path: Path, run: RunRl
) -> None:
    (tmp_path / "agents.py").write_text(AGENT)
    section["environment"] = {"agent": f"{tmp_path / 'agents.py'}:agent"}
    section["rewards"][0]["max_failed"] = 0.5
    section["prompts_per_step"] = 4  # the first prompt, whose completions all fail, may be in a step twice
    section["execution"] = {"max_staleness": staleness}
    outputs, result = run(section, chat_template=BARE)
    tokenizer, cut = byte_tokenizer(), 0
    for row in rows_of(outputs):
        assert tokenizer.decode(row["prompt_ids"]) == f"<system>Say it.<user>{row['prompt_text']}<assistant>"
        ids, mask = np.asarray(row["completion_ids"]), np.asarray(row["mask"])
        first, observation, last = np.split(ids, np.flatnonzero(np.diff(mask.astype(int))) + 1)
        was_cut = first[-1] != tokenizer.eos_token_id
        cut += was_cut
        assert len(first) == 12 if was_cut else len(first) <= 12
        text = tokenizer.decode(first, skip_special_tokens=True)
        assert tokenizer.decode(observation) == f"{'<eos>' if was_cut else ''}<user>no: {len(text)}<assistant>"
        assert row["rewards"] == pytest.approx([len(tokenizer.decode(last, skip_special_tokens=True)) / 10])
        assert (np.asarray(row["versions"])[mask] >= 0).all()
    assert cut > 0
    assert result.metrics["mismatch"] < (1e-6 if staleness == 0 else 0.1), "the trainer reads what the engine read"
    if staleness == 0:
        _, again = run(section, "again", chat_template=BARE)
        assert again.outputs == result.outputs


@pytest.mark.parametrize("staleness", matrix([0, 1], usual=[0]))
def test_failed_episodes_are_counted_and_left_out(
    staleness: int, section: Section, resources: ResourcesConfig, tmp_path: Path, run: RunRl
) -> None:
    section["environment"]["name"] = f"{tmp_path / 'environments.py'}:Bad"
    section["rewards"][0]["max_failed"] = 0.5
    section["prompts_per_step"] = 4  # the first prompt, whose completions all fail, may be in a step twice
    section["execution"] = {"max_staleness": staleness}
    wanted = resources.model_copy(update={"reward_timeout_seconds": 3.0, "environment_processes": 1})
    outputs, result = run(section, resources=wanted)
    failed = {name: count for name, count in result.cost.items() if name.startswith("failed_rewards")}
    rows = rows_of(outputs)
    assert failed["failed_rewards"] % GENERATIONS == 0, failed
    assert failed["failed_rewards_timeout"] * 4 == failed["failed_rewards"]
    assert failed["failed_rewards_raised"] * 4 == 3 * failed["failed_rewards"], "counted by reason"
    used, left_out = ([row for row in rows if row["used"] is value] for value in (True, False))
    assert {tuple(row["rewards"]) for row in used} == {(1.0,)}
    assert len({row["prompt_text"] for row in used}) == 7, "all but the one whose episodes went wrong"
    assert {tuple(row["rewards"]) for row in left_out} == {(None,)}
    assert len({row["prompt_text"] for row in left_out}) == 1
    assert {reason for row in left_out for reason in row["failures"]} == {"timeout", "raised"}


def test_a_policy_that_calls_a_tool_gets_the_result_and_a_reward_for_its_answer(
    section: Section, tiny_model: Any, tmp_path: Path, run: RunRl
) -> None:
    call, observation, answer = '<tool_call>{"name": "dice"}</tool_call><eos>', "<user>six<assistant>", "6<eos>"
    texts = [f"{prompt}{call}{observation}{answer}" for prompt in prompts().column("prompt").to_pylist()]
    policy = taught(tiny_model(), texts, tmp_path / "policy")
    (tmp_path / "tools.py").write_text(TOOLS)
    options = {"tools": [f"{tmp_path / 'tools.py'}:dice"], "verifier": f"{tmp_path / 'tools.py'}:is_six"}
    section["environment"] = {"name": "alignment_core.environments.tools:Tools", "options": options}
    outputs, result = run(section | {"steps": 1}, model=policy)
    assert result.cost["failed_rewards"] == 0
    (rows,) = steps_of(outputs)
    parts = [byte_tokenizer()(text)["input_ids"] for text in (call, observation, answer)]
    ids, mask = np.concatenate(parts), [number != 1 for number, part in enumerate(parts) for _ in part]
    did = [row for row in rows if np.array_equal(row["completion_ids"], ids)]
    assert len(did) > len(rows) / 2, [row["completion_text"] for row in rows]
    assert {(tuple(row["mask"]), tuple(row["rewards"])) for row in did} == {(tuple(mask), (1.0,))}


def taught(model: Path, texts: list[str], folder: Path) -> Path:
    """The model after it has learned these texts by heart."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    learner = transformers.AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=5e-3)
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    for _ in range(120):
        loss = learner(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(model, folder)
    learner.save_pretrained(folder)
    return folder


def test_an_episode_ends_at_its_last_turn(section: Section, tmp_path: Path, run: RunRl) -> None:
    section["environment"] = {"name": f"{tmp_path / 'environments.py'}:Endless", "max_turns": 3}
    section |= {"steps": 1}
    outputs, _ = run(section)
    for row in steps_of(outputs)[0]:
        turns = (np.diff(np.asarray(row["mask"]).astype(int)) == -1).sum() + 1
        if row["finish_reason"] == "stop" and len(row["completion_ids"]) < 200:  # nor stopped at the end of the budget
            assert (turns, row["rewards"]) == (3, [0.75])
        else:
            assert row["rewards"] == [0.25 * turns]


def test_episodes_of_a_dead_process_fail_with_the_reason(section: Section, tmp_path: Path, run: RunRl) -> None:
    section["environment"]["name"] = f"{tmp_path / 'environments.py'}:Crash"
    says = r"the environment .+ for the prompt .+1 of 12 completions may lack a reward \(rl\.rewards\.0\.max_failed"
    with pytest.raises(DataError, match=says):
        run(section)


def test_episodes_of_a_killed_process_restart_and_the_policy_is_that_of_an_undisturbed_run(
    section: Section, tmp_path: Path, run: RunRl
) -> None:
    marker = tmp_path / "killed"
    section["environment"] = {
        "name": f"{tmp_path / 'environments.py'}:Killed",
        "options": {"marker": str(marker)},
        "max_turns": 3,
    }
    _, killed = run(section, "killed-once")
    assert marker.exists()
    assert killed.cost["failed_rewards"] == 0
    _, undisturbed = run(section, "undisturbed")
    assert killed.outputs == undisturbed.outputs


def test_evaluation_for_the_best_policy_has_the_environments_alone(
    section: Section, resources: ResourcesConfig, tmp_path: Path, run: RunRl
) -> None:
    section |= {
        "execution": {"max_staleness": 1},
        "best": {"prompts": {"task": "reverse", "rows": 8}, "eval_steps": 1},
        "environment": {"name": f"{tmp_path / 'environments.py'}:Lingers"},
    }
    wanted = resources.model_copy(update={"environment_processes": 1})
    outputs, result = run(section, resources=wanted)
    assert result.cost["failed_rewards"] == 0
    assert (outputs["best"] / "model.safetensors").exists()
