"""Functions that reward a prompt's completions at once: what they see, and what one that fails takes with it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from alignment_core.errors import DataError, Stopped
from alignment_core.evaluation.failures import Account, numbers
from alignment_core.rollout.group_function import GroupFunction

SOURCE = """
import asyncio, os, time

def plain(rows):
    assert {row["prompt"] for row in rows} == {rows[0]["prompt"]}
    if rows[0]["completion"] == "hang":
        time.sleep(600)
    return [len(row["completion_ids"]) + rows[0]["weight"] for row in rows]

def seen(rows):
    row = rows[0]
    assert row["prompt_ids"] == [1, 2] and row["completion_ids"] == [3] and row["finish_reason"] == "stop"
    assert "logps" not in row and "prompt_text" not in row, row
    return [1.0] * len(rows)

def process(rows):
    return [os.getpid()] * len(rows)

def odd(rows):
    what = rows[0]["completion"]
    answers = {"nan": [float("nan"), 1.0], "short": [1.0], "none": [None, 1.0], "number": 1.0, "words": ["good", 1]}
    return answers[what] if what in answers else 1 / 0

async def slow(rows):
    what = rows[0]["completion"]
    if what == "hang":
        await asyncio.sleep(600)
    if what == "block":
        time.sleep(600)
    if what == "exit":
        await asyncio.sleep(0.1)
        os._exit(3)
    await asyncio.sleep(0.3)
    return [0.5] * len(rows)
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    (tmp_path / "groups.py").write_text(SOURCE)
    return f"{tmp_path}/groups.py"


def rows(*completions: str) -> list[dict[str, Any]]:
    """Two rows for each completion, of a prompt of their own; those of the prompts take turns."""
    return [
        {
            "source": f"p.jsonl:{group}",
            "group": group,
            "prompt_text": f"prompt {group}",
            "completion_text": one,
            "label": None,
            "prompt_ids": [1, 2],
            "completion_ids": np.array([3], np.int32),
            "logps": np.zeros(1, np.float32),
            "finish_reason": "stop",
            "weight": group / 10,
        }
        for _ in range(2)
        for group, one in enumerate(completions)
    ]


def rewards(function: str, given: list[dict[str, Any]], timeout: float = 30.0, max_failed: float = 0.5) -> list[Any]:
    source = GroupFunction(function, timeout, "rl.rewards.0.function")
    try:
        account = Account(f"the function {function.rpartition(':')[2]}", max_failed, "rl.rewards.0.max_failed")
        return [numbers(account.settle(given, source(given))), dict(account.failed)]
    finally:
        source.close()


def test_a_function_sees_whole_groups_and_what_is_plain_of_each_row(name: str) -> None:
    assert rewards(f"{name}:plain", rows("a", "b", "c")) == [[1.0, 1.1, 1.2] * 2, {}]
    assert rewards(f"{name}:seen", rows("a")) == [[1.0, 1.0], {}]


@pytest.mark.parametrize(
    ("completion", "given", "failed"),
    [
        ("nan", [None, 1.0], {"bad_number": 1}),
        ("none", [None, 1.0], {"none_given": 1}),
        ("short", [None, None], {"wrong_shape": 2}),
        ("number", [None, None], {"wrong_shape": 2}),
        ("words", [None, None], {"raised": 2}),
        ("raise", [None, None], {"raised": 2}),
    ],
)
def test_what_is_no_number_for_each_completion_has_a_type_and_is_counted(
    name: str, completion: str, given: list[Any], failed: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    assert rewards(f"{name}:odd", rows(completion), max_failed=1.0) == [given, failed]
    assert "p.jsonl:0: the function odd " in caplog.text
    assert "for the prompt 'prompt 0'; it is left out" in caplog.text


def test_more_failures_than_allowed_end_the_run_and_name_the_field(name: str) -> None:
    says = r"^p\.jsonl:0: the function odd answered 1 numbers for 2 completions, .*; 1 of 4 .*rl\.rewards\.0\.max_failed 0\.25"
    with pytest.raises(DataError, match=says):
        rewards(f"{name}:odd", rows("short", "none"), max_failed=0.25)


def test_a_group_that_hangs_is_ended_alone(name: str) -> None:
    assert rewards(f"{name}:plain", rows("a", "hang", "c"), timeout=2.0) == [[1.0, None, 1.2] * 2, {"timeout": 2}]


def test_groups_of_an_async_function_run_at_the_same_time_and_one_that_hangs_costs_the_others_nothing(
    name: str,
) -> None:
    started = time.monotonic()
    given = rows("a", "hang", *"bcdefghijklmnopqrstuvwxyz")
    assert rewards(f"{name}:slow", given, timeout=2.0) == [[0.5, None, *[0.5] * 25] * 2, {"timeout": 2}]
    assert time.monotonic() - started < 0.3 * 26


@pytest.mark.parametrize(("completion", "reason"), [("block", "timeout"), ("exit", "crashed")])
def test_an_async_group_that_takes_the_process_with_it_is_found_and_the_others_are_asked_again(
    name: str, completion: str, reason: str
) -> None:
    given = rows("a", completion, "b")
    assert rewards(f"{name}:slow", given, timeout=1.0) == [[0.5, None, 0.5] * 2, {reason: 2}]


def test_one_process_lasts_until_it_is_closed_also_while_another_thread_waits_for_it(name: str) -> None:
    process = GroupFunction(f"{name}:process", 30.0, "rl.rewards.0.function")
    (_, first), (_, second) = process(rows("a")), process(rows("b"))
    process.close()
    assert first[1] == second[1]
    assert not psutil.pid_exists(int(first[1]))

    source, ended = GroupFunction(f"{name}:plain", 30.0, "rl.rewards.0.function"), []

    def wait() -> None:
        with pytest.raises(Stopped):
            ended.append(list(source(rows("hang"))))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(1.0)
    source.close()
    thread.join(10)
    assert (thread.is_alive(), ended) == (False, [])
    with pytest.raises(Stopped):
        list(source(rows("a")))
