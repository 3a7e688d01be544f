"""A user's function in several processes: the same answers as in one, and hanging or crashing calls affect no others."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from alignment_core.errors import InfrastructureError, Stopped, UserError
from alignment_core.rewards.verify import Verifier
from alignment_core.user_code import pool as user_pool
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.pool import FunctionPool, Node, NodePool, PoolJob
from alignment_core.user_code.process import FunctionProcess

SOURCE = """
import asyncio, os, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def double(x):
    return 2.0 * x

def meet(x, processes):
    # until as many processes have a call under way
    (HERE / f"{os.getpid()}.here").touch()
    while len(list(HERE.glob("*.here"))) < processes:
        time.sleep(0.01)
    return float(x)

def odd(x):
    if x == 1:
        (HERE / "hangs").touch()
        time.sleep(600)
    if x == 2:
        os._exit(3)
    while not (HERE / "hangs").exists():
        time.sleep(0.01)
    return float(x)

async def pid(x):
    await asyncio.sleep(0.3)
    return os.getpid()
"""

ALONE = """
import time
from pathlib import Path

HERE = Path(__file__).parent
try:
    (HERE / "lock").mkdir()
except FileExistsError:
    (HERE / "refused").touch()
    raise

def alone(x, waits=True):
    # until a second process has found the lock taken
    while waits and not (HERE / "refused").exists():
        time.sleep(0.01)
    time.sleep(0.0 if waits else 0.1)
    return float(x)
"""


MODEL = """
import os, time
from pathlib import Path

WEIGHTS = b"w" * (300 << 20)
HERE = Path(__file__).parent

def pid(x, processes):
    # until as many processes have a call under way
    (HERE / f"{os.getpid()}.here").touch()
    while len(list(HERE.glob("*.here"))) < processes:
        time.sleep(0.01)
    time.sleep(0.1)
    return os.getpid()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(SOURCE)
    return tmp_path / "functions.py"


def pool(file: Path, function: str, size: int) -> closing[FunctionPool]:
    return closing(FunctionPool(f"{file}:{function}", 60.0, "rl.rewards.0.function", size))


def pids(of: FunctionPool) -> list[int]:
    workers = [member.worker for member in of._members]
    return [
        worker._process.pid for worker in workers if isinstance(worker, FunctionProcess) and worker._process is not None
    ]


def late_once_it_hangs(process: FunctionProcess | Node, file: Path) -> None:
    """Call 1 times out when it reports that it hangs, and no other call does, on however busy a machine."""
    assert isinstance(process, FunctionProcess)
    answer = process._answer

    def answer_or_late(since: dict[int, float]) -> Any:
        while not select.select([process._socket], [], [], 0.01)[0]:
            if 1 in since and (file.parent / "hangs").exists():
                process._patience = 0.0  # until the process starts again
                break
        return answer(since)

    process._answer = answer_or_late  # type: ignore[method-assign]


def test_calls_that_wait_are_made_in_more_processes_up_to_the_pools_size(file: Path) -> None:
    with pool(file, "meet", 3) as calls:
        assert dict(calls.answers([[n, 3] for n in range(12)])) == {n: float(n) for n in range(12)}
        first = pids(calls)
        assert len(first) == 3
        assert len(dict(calls.answers([[n, 3] for n in range(12)]))) == 12
        assert pids(calls) == first, "they last"
    assert not any(psutil.pid_exists(pid) for pid in first)


@pytest.mark.parametrize("size", [1, 4])
def test_answers_do_not_depend_on_the_pools_size(file: Path, size: int) -> None:
    with pool(file, "double", size) as calls:
        for count in (0, 1, 200):
            assert dict(calls.answers([[n] for n in range(count)])) == {n: 2.0 * n for n in range(count)}
        assert len(pids(calls)) == 1, "no call waited for a timeout"


def test_a_hanging_call_and_a_crashing_call_fail_alone(file: Path) -> None:
    with pool(file, "odd", 2) as calls:
        for member in calls._members:
            late_once_it_hangs(member.worker, file)
        answers = dict(calls.answers([[n] for n in range(8)]))
    failed = {n: answer.reason for n, answer in answers.items() if isinstance(answer, Failed)}
    assert failed == {1: "timeout", 2: "crashed"}
    assert {n: answer for n, answer in answers.items() if n not in failed} == {n: float(n) for n in (0, 3, 4, 5, 6, 7)}


def test_a_coroutine_function_has_one_process_which_works_on_many_calls(file: Path) -> None:
    with pool(file, "pid", 4) as calls:
        assert len(set(dict(calls.answers([[n] for n in range(200)])).values())) == 1


def test_abandoned_calls_are_ended_and_later_calls_are_answered(file: Path) -> None:
    with pool(file, "odd", 2) as calls:
        answers: Any = calls.answers([[0], [1], [3]])
        assert next(answers)[0] in (0, 3)
        answers.close()
        assert dict(calls.answers([[4], [5]])) == {0: 4.0, 1: 5.0}, "another process, though 1 hangs for a minute"


def test_closing_ends_calls_that_are_under_way_in_all_processes(file: Path) -> None:
    with pool(file, "meet", 2) as calls:
        ended: list[str] = []

        def ask() -> None:
            with pytest.raises(Stopped):
                list(calls.answers([[n, 9] for n in range(4)]))
            ended.append("ended")

        thread = threading.Thread(target=ask)
        thread.start()
        while len(list(file.parent.glob("*.here"))) < 2:
            time.sleep(0.01)
        calls.close()
        thread.join(60)
        assert ended == ["ended"]
        with pytest.raises(Stopped):
            list(calls.answers([[1, 1]]))


def test_a_function_that_cannot_be_loaded_is_reported_once(file: Path) -> None:
    with pool(file, "dubble", 4) as calls, pytest.raises(UserError, match=r"has no 'dubble'; did you mean 'double'\?"):
        list(calls.answers([[1]] * 8))


def test_a_function_that_loads_only_once_runs_in_its_first_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    with pool(tmp_path / "alone.py", "alone", 2) as calls:
        assert dict(calls.answers([[n] for n in range(6)])) == {n: float(n) for n in range(6)}
        while not caplog.records:
            time.sleep(0.01)
        assert "FileExistsError" in caplog.text
        assert "continue without further ones" in caplog.text
        (tmp_path / "refused").unlink()
        assert dict(calls.answers([[n, False] for n in range(6)])) == {n: float(n) for n in range(6)}
        assert not (tmp_path / "refused").exists(), "it is not tried again"


@contextmanager
def node(file: Path, ended: bool = False) -> Iterator[tuple[Node, list[tuple[str, float]]]]:
    """A node's pool in this process; and its calls, with their timeouts. One that ``ended`` is lost."""
    inside = NodePool(PoolJob(f"{file}:double", 30.0, 30.0, "rl.rewards.0.function", 2, {}, tuple(sys.path)))
    calls: list[tuple[str, float]] = []

    class Group:
        size = 1

        def one_within(self, timeout: float, index: int, method: Any, *arguments: Any) -> Any:
            calls.append((method.__name__, timeout))
            if ended and method is NodePool.answers:
                of.close()
                raise InfrastructureError("rewards: an actor died")
            return method(inside, *arguments)

    group: Any = Group()
    of = Node(group, 0, 100.0)
    with closing(inside._pool):
        yield of, calls


def test_a_node_has_time_for_all_calls_of_a_batch(file: Path) -> None:
    calls = [[n] for n in range(6)]
    with node(file) as (of, requested):
        assert dict(of.answers(calls, deque(range(6)))) == {n: 2.0 * n for n in range(6)}
    assert [method for method, _ in requested] == ["batch", "answers", "answers"]
    assert requested[1][1] >= 100 + 4 * 30
    assert requested[2][1] >= 100 + 2 * 30


def test_a_node_whose_actor_ends_because_the_pool_is_closed_was_stopped(file: Path) -> None:
    with node(file, ended=True) as (of, _), pytest.raises(Stopped):
        list(of.answers([[1]], deque([0])))


def test_a_verifier_of_the_user_answers_from_the_pool(file: Path) -> None:
    (file.parent / "verifier.py").write_text("def f(prompt, completion, label): return len(completion) / 100\n")
    rows = [{"prompt_text": "?", "completion_text": "a" * n, "label": None} for n in range(50)]
    with Verifier(f"{file.parent / 'verifier.py'}:f", 60.0, processes=3) as verifier:
        assert sorted(verifier(rows)) == [(n, n / 100) for n in range(50)]


@pytest.mark.parametrize(("size", "processes"), [(None, 1), (2, 2)])
def test_a_function_that_holds_a_model_has_one_process_unless_the_recipe_sets_the_number(
    size: int | None, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In place of a model: 300 MiB of weights, and a threshold of 200 MiB."""
    monkeypatch.setattr(user_pool, "MODEL_BYTES", 200 << 20)
    monkeypatch.setattr(user_pool, "GROWS_AFTER_SECONDS", 0.0)
    (tmp_path / "model.py").write_text(MODEL)
    name = f"{tmp_path / 'model.py'}:pid"
    with closing(FunctionPool(name, 60.0, "rl.rewards.0.function", size, load_timeout=60.0)) as calls:
        for _ in range(2):
            answers = {pid for _, pid in calls.answers([[n, processes] for n in range(8)])}
            assert len(answers) == processes
        first = calls._members[0].worker
        assert isinstance(first, FunctionProcess)
        assert 300 << 20 < first.peak_memory < 600 << 20
    one_only = "took 0.3 GiB of memory to load, and has one process only; resources.reward_processes sets the number"
    assert (one_only in caplog.text) == (size is None)


def test_a_small_function_has_more_processes_by_default(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_pool, "usable_cores", lambda: 2)
    with closing(FunctionPool(f"{file}:meet", 60.0, "rl.rewards.0.function", None)) as calls:
        assert len(dict(calls.answers([[n, 2] for n in range(4)]))) == 4, "its calls wait for each other"


def test_loading_has_a_deadline_of_its_own(file: Path) -> None:
    """No interpreter starts within a millisecond."""
    process = FunctionProcess(f"{file}:double", 0.001, "rl.rewards.0.function", load_timeout=60.0)
    with closing(process):
        process.load()
        assert process.is_loaded
    says = r"cannot be loaded: it was not loaded within 0\.001 seconds \(resources\.reward_load_timeout_seconds\)"
    with (
        closing(FunctionProcess(f"{file}:double", 60.0, "rl.rewards.0.function", load_timeout=0.001)) as late,
        pytest.raises(UserError, match=says),
    ):
        late.load()
