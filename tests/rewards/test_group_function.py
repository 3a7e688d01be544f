"""Functions that reward all completions of a prompt: their arguments, and the effects of a failing one."""

from __future__ import annotations

import json
import select
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from alignment_core.errors import DataError, Stopped, UserError
from alignment_core.rewards.group_function import GroupFunction
from alignment_core.rewards.results import Account, extras, numbers, scores
from alignment_core.user_code.process import FunctionProcess

SOURCE = """
import asyncio, os, time
from pathlib import Path

def hang():
    Path(__file__).with_suffix(".hangs").touch()
    time.sleep(600)

def plain(rows):
    assert {row["prompt"] for row in rows} == {rows[0]["prompt"]}
    if rows[0]["completion"] == "hang":
        hang()
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

under_way, answered = set(), set()

async def meets(rows):
    # each waits until all 27 are under way; the one that hangs, once the others have answered, lets its time be over
    what = rows[0]["completion"]
    under_way.add(what)
    while len(under_way) < 27 or (what == "hang" and len(answered) < 26):
        await asyncio.sleep(0)
    if what == "hang":
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + 1e6
        await asyncio.Event().wait()
    answered.add(what)
    return [0.5] * len(rows)

async def takes_all(rows):
    # the first time all three are under way when one of them blocks or exits
    what, again = rows[0]["completion"], Path(__file__).with_suffix(".again")
    under_way.add(what)
    while not again.exists() and (len(under_way) < 3 or what in "ab"):
        await asyncio.sleep(0)
    if what not in "ab":
        again.touch()
    if what == "block":
        hang()
    if what == "exit":
        os._exit(3)
    return [0.5] * len(rows)
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    (tmp_path / "groups.py").write_text(SOURCE)
    return f"{tmp_path}/groups.py"


def timing_out(source: GroupFunction, name: str) -> None:
    """A call that reports that it hangs times out at once, and no other call does, on however busy a machine.

    For functions that return one answer at a time: of several, some may have been read already.
    """
    process = source._pool._members[0].worker
    assert isinstance(process, FunctionProcess)
    says = Path(name).with_suffix(".hangs")
    answer = process._answer

    def answer_or_late(since: dict[int, float]) -> Any:
        while not select.select([process._socket], [], [], 0.01)[0]:
            if says.exists():
                says.unlink()
                process._patience = 0.0  # until the process starts again
                break
        return answer(since)

    process._answer = answer_or_late  # type: ignore[method-assign]


def rows(*completions: str) -> list[dict[str, Any]]:
    """Two rows for each completion, with a separate prompt; prompts alternate."""
    return [
        {
            "source": f"p.jsonl:{group}",
            "group": group,
            "prompt_text": f"prompt {group}",
            "completion_text": completion,
            "label": None,
            "prompt_ids": [1, 2],
            "completion_ids": np.array([3], np.int32),
            "logps": np.zeros(1, np.float32),
            "finish_reason": "stop",
            "weight": group / 10,
        }
        for _ in range(2)
        for group, completion in enumerate(completions)
    ]


def rewards(function: str, given: list[dict[str, Any]], max_failed: float = 0.5, hangs: bool = False) -> list[Any]:
    source = GroupFunction(function, 60.0, "rl.rewards.0.function")
    if hangs:
        timing_out(source, function.rpartition(":")[0])
    try:
        account = Account(f"the function {function.rpartition(':')[2]}", max_failed, "rl.rewards.0.max_failed")
        return [numbers(account.settle(given, source(given))), dict(account.failed)]
    finally:
        source.close()


def test_a_function_gets_whole_groups_and_plain_columns_of_each_row(name: str) -> None:
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
def test_results_without_a_number_for_each_completion_are_counted_by_type(
    name: str, completion: str, given: list[Any], failed: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    assert rewards(f"{name}:odd", rows(completion), max_failed=1.0) == [given, failed]
    assert "p.jsonl:0: the function odd " in caplog.text
    assert "for the prompt 'prompt 0'; it is left out" in caplog.text


def test_more_failures_than_allowed_end_the_run_and_name_the_field(name: str) -> None:
    says = r"^p\.jsonl:0: the function odd returned 1 numbers for 2 completions, .*; 1 of 4 .*rl\.rewards\.0\.max_failed 0\.25"
    with pytest.raises(DataError, match=says):
        rewards(f"{name}:odd", rows("short", "none"), max_failed=0.25)


def test_a_group_that_hangs_is_ended_alone(name: str) -> None:
    assert rewards(f"{name}:plain", rows("a", "hang", "c"), hangs=True) == [[1.0, None, 1.2] * 2, {"timeout": 2}]


def test_groups_of_an_async_function_run_concurrently_and_a_hanging_group_fails_alone(
    name: str,
) -> None:
    given = rows("a", "hang", *"bcdefghijklmnopqrstuvwxyz")
    assert rewards(f"{name}:meets", given) == [[0.5, None, *[0.5] * 25] * 2, {"timeout": 2}]


@pytest.mark.parametrize(("completion", "reason"), [("block", "timeout"), ("exit", "crashed")])
def test_an_async_group_that_kills_the_process_fails_alone_and_other_groups_are_retried(
    name: str, completion: str, reason: str
) -> None:
    given = rows("a", completion, "b")
    assert rewards(f"{name}:takes_all", given, hangs=completion == "block") == [[0.5, None, 0.5] * 2, {reason: 2}]


def test_a_process_lasts_until_closed_even_while_another_thread_waits(name: str) -> None:
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
    while not Path(name).with_suffix(".hangs").exists():
        time.sleep(0.01)
    source.close()
    thread.join(60)
    assert (thread.is_alive(), ended) == (False, [])
    with pytest.raises(Stopped):
        list(source(rows("a")))


FORMS = """
import json
from datetime import date
from fractions import Fraction
from pathlib import Path

class Tensor:
    def __init__(self, values): self.values = values
    def tolist(self): return self.values

def trl(completions, label, **kwargs):
    assert kwargs["prompts"] == ["prompt 0"] * 2 and kwargs["completion_ids"] == [[3], [3]]
    return [None if label[0] is not None else len(one) for one in completions]

async def waits(prompts, completions):
    return [len(one) for one in completions]

def openrlhf(queries, prompts, labels):
    assert queries == ["prompt 0ab"] * 2
    return {"rewards": Tensor([0.5, -1.0]), "scores": Tensor([1, 0]), "extra_logs": {"length": Tensor([2, 2]), "share": 0.5}}

def listed(queries, prompts, labels, **kwargs):
    return Tensor([1.0, 2.0])

def ambiguous(queries, prompts, labels, completions):
    return [0.0] * len(completions)

def ours(completions):
    return [float(len(one["completion_ids"])) for one in completions]

def scaled(completions, scale=2.0):
    return [scale * value for value in ours(completions)]

def partly(rows):
    what = rows[0]["completion"]
    return {"rewards": [1.0, True], **{
        "words": {"rewards": ["a", 1.0]},
        "none": {"rewards": [None, 1.0], "extra_logs": None},
        "list": {"extra_logs": [1.0, 2.0]},
        "scores": {"scores": [None, "x"]},
        "nan": {"scores": [float("nan"), 0.5]},
        "extras": {"extra_logs": {"len": [1.0, None], "rewards": [float("nan"), True], "note": "good", "of": {}}},
    }[what]}

def peers(queries, prompts, labels):
    return partly([{"completion": queries[0][len(prompts[0]):]}])

def other(completions, solution, **kwargs):
    return [0.0] * len(completions)

def logs(completions, log_extra, log_metric, **kwargs):
    log_extra("length", Tensor([len(one) for one in completions]))
    log_extra("said", completions)
    log_metric("share", 0.25)
    log_extra("when", [date(2026, 1, 1) for one in completions])
    log_metric("day", date(2026, 1, 1))
    log_extra("of the batch", [1.0, 2.0, 3.0])
    return [Fraction(1)] * len(completions)

def told(completions, **kwargs):
    Path(__file__).with_suffix(".json").write_text(json.dumps({
        name: values for name, values in kwargs.items() if not callable(values)
    } | {"completions": completions}))
    return [1.0] * len(completions)

def own(rows):
    Path(__file__).with_suffix(".json").write_text(json.dumps(rows[0]))
    return [1.0] * len(rows)
"""


@pytest.fixture
def forms(tmp_path: Path) -> str:
    (tmp_path / "forms.py").write_text(FORMS)
    return f"{tmp_path}/forms.py"


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("trl", [2.0, 2.0]),
        ("waits", [2.0, 2.0]),
        ("openrlhf", [0.5, -1.0]),
        ("listed", [1.0, 2.0]),
        ("ours", [1.0, 1.0]),
        ("scaled", [2.0, 2.0]),
    ],
)
def test_functions_for_trl_openrlhf_and_this_project_run_unchanged(
    forms: str, function: str, given: list[float]
) -> None:
    assert rewards(f"{forms}:{function}", rows("ab")) == [given, {}]


def test_scores_and_extra_numbers_of_openrlhf_come_with_the_rewards(forms: str) -> None:
    source = GroupFunction(f"{forms}:openrlhf", 60.0, "rl.rewards.0.function")
    settled = Account("it", 0.0, "f").settle(rows("ab"), source(rows("ab")))
    source.close()
    assert (numbers(settled), scores(settled)) == ([0.5, -1.0], [1.0, 0.0])
    assert extras(settled[:1]) == {"length": 2.0, "share": 0.5}


@pytest.mark.parametrize("function", ["partly", "peers"])
@pytest.mark.parametrize(
    ("completion", "given", "failed"),
    [
        ("words", [None, 1.0], {"bad_number": 1}),
        ("none", [None, 1.0], {"none_given": 1}),
        ("list", [None, None], {"wrong_shape": 2}),
        ("scores", [1.0, None], {"bad_number": 1}),
        ("nan", [None, 1.0], {"bad_number": 1}),
        ("extras", [1.0, 1.0], {}),
    ],
)
def test_a_bad_number_fails_only_its_completion(
    forms: str, function: str, completion: str, given: list[Any], failed: dict[str, int]
) -> None:
    assert rewards(f"{forms}:{function}", rows(completion), max_failed=1.0) == [given, failed]


def test_extra_numbers_that_are_none_or_not_finite_are_left_out(forms: str) -> None:
    source = GroupFunction(f"{forms}:partly", 60.0, "rl.rewards.0.function")
    answers = dict(source(rows("extras")))
    source.close()
    assert [extras([answers[number]]) for number in (0, 1)] == [{"len": 1.0}, {"rewards": 1.0}]


def test_a_function_of_ambiguous_form_or_with_missing_columns_is_refused(forms: str) -> None:
    with pytest.raises(
        UserError,
        match="could be a function for TRL or for OpenRLHF: take `completions` and no `queries` for TRL's form",
    ):
        rewards(f"{forms}:ambiguous", rows("ab"))
    with pytest.raises(DataError, match="it needs the columns solution, but completions have "):
        rewards(f"{forms}:other", rows("ab"), max_failed=0.0)


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2="}]


def conversation(*completions: str) -> list[dict[str, Any]]:
    """Completions of a prompt that was given as messages and keeps further columns."""
    columns = {"solution": "4", "steps": [1, 2]}
    given = {"messages": json.dumps(CHAT), "columns": json.dumps(columns), "group": 0, "prompt_text": "<user>2+2="}
    return [{**rows("")[0], **given, "completion_text": completion} for completion in completions]


def test_trl_functions_get_messages_and_columns_as_in_trl(forms: str) -> None:
    given = conversation("4", "5")
    assert rewards(f"{forms}:told", given) == [[1.0, 1.0], {}]
    seen = json.loads(Path(forms).with_suffix(".json").read_text())
    assert seen["prompts"] == [CHAT, CHAT]
    assert seen["completions"] == [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
    assert (seen["solution"], seen["steps"], seen["completion_ids"]) == (["4", "4"], [[1, 2]] * 2, [[3], [3]])
    assert not {"messages", "columns", "prompt", "completion"} & seen.keys()


def test_a_text_that_a_template_wrapped_is_no_conversation(forms: str) -> None:
    given = [{**row, "messages": json.dumps("2+2=")} for row in conversation("4")]
    rewards(f"{forms}:told", given)
    seen = json.loads(Path(forms).with_suffix(".json").read_text())
    assert (seen["prompts"], seen["completions"]) == (["<user>2+2="], ["4"])


def test_our_functions_get_messages_as_a_list_and_columns_by_name(forms: str) -> None:
    assert rewards(f"{forms}:own", conversation("4")) == [[1.0], {}]
    seen = json.loads(Path(forms).with_suffix(".json").read_text())
    assert (seen["messages"], seen["solution"], seen["steps"]) == (CHAT, "4", [1, 2])
    assert (seen["prompt"], seen["completion"], "columns" in seen) == ("<user>2+2=", "4", False)
    rewards(f"{forms}:own", rows("4"))
    assert json.loads(Path(forms).with_suffix(".json").read_text())["messages"] is None, "no template was applied"


def test_values_logged_by_trl_functions_are_returned_with_the_rewards(forms: str) -> None:
    source = GroupFunction(f"{forms}:logs", 60.0, "rl.rewards.0.function")
    answers = dict(source(rows("ab")))
    source.close()
    assert [(answers[number].reward, extras([answers[number]])) for number in (0, 1)] == [
        (1.0, {"length": 2.0, "share": 0.25})
    ] * 2
