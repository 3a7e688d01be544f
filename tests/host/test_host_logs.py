"""The log of a run host reaches the run with stage and rank, bounded, for any content."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment.flows.host_log import level
from alignment_core.host import logs
from alignment_core.host.logs import LogTail, prune_logs

Lines = list[tuple[str | None, str, str]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.log"


@pytest.fixture
def read(log: Path) -> Callable[[str], Lines]:
    """The lines that a tail forwards from a log with this text."""

    def handed_on(text: str) -> Lines:
        log.write_text(text)
        received: Lines = []
        LogTail(log, 0, lambda *line: received.append(line)).close()
        return received

    return handed_on


def test_lines_carry_the_rank_and_the_stage_that_has_the_actors(read: Callable[[str], Lines]) -> None:
    assert read(
        "(trainers[0] pid=11) before any stage\n"
        "[align] trainers serve round-1/dpo\n"
        "[align] engines serve base/evaluation/generate\n"
        "(trainers[1] pid=12) gradient overflow\n"
        "(engines[0] pid=13) slow\n"
        "(RayWorkerWrapper pid=14, ip=10.0.0.2) vLLM's own worker\n"
        "(raylet) a worker died\n"
        "2026-01-01 00:00:00,000 ERROR root: sft failed\n"
        "[align] trainers serve round-2/dpo\n"
        "(trainers[1] pid=12) next\n"
    ) == [
        (None, "trainers[0]", "before any stage"),
        ("round-1/dpo", "trainers[1]", "gradient overflow"),
        ("base/evaluation/generate", "engines[0]", "slow"),
        ("base/evaluation/generate", "RayWorkerWrapper", "vLLM's own worker"),
        (None, "raylet", "a worker died"),
        (None, "host", "2026-01-01 00:00:00,000 ERROR root: sft failed"),
        ("round-2/dpo", "trainers[1]", "next"),
    ]


def test_lines_that_belong_together_arrive_together(read: Callable[[str], Lines]) -> None:
    traceback = 'Traceback (most recent call last):\n  File "trainer.py", line 1, in train\nRuntimeError: broken'
    prefixed = "".join(f"(trainers[1] pid=7) {line}\n" for line in traceback.splitlines())
    assert read(f"[align] trainers serve sft\n{prefixed}") == [("sft", "trainers[1]", traceback)]


def test_long_lines_are_cut_and_progress_bars_reduced_to_their_end(read: Callable[[str], Lines]) -> None:
    (_, _, long), (_, _, bar) = read("x" * 10_000 + "\n(engines[0] pid=1) 0%\r 50%\r100%\n")
    assert len(long) < 2100
    assert long.endswith("(10000 characters)")
    assert bar == "100%"


def test_lines_beyond_the_rate_limit_are_counted_and_later_lines_forwarded(log: Path) -> None:
    log.write_text("".join(f"line {n}\n" for n in range(100_000)))
    received: Lines = []
    tail = LogTail(log, 0, lambda *line: received.append(line))
    tail.close()
    lines = [line for _, _, text in received for line in text.splitlines()]
    assert len(lines) < 1000
    left_out = 100_000 - (len(lines) - 1)
    assert lines[-1] == f"… {left_out} lines left out, see {log}"


def test_the_last_output_is_forwarded_without_a_line_end_and_with_any_bytes(log: Path) -> None:
    log.write_bytes(b"\xff broken\n\nFatal")
    received: Lines = []
    LogTail(log, 0, lambda *line: received.append(line)).close()
    assert [text for _, _, text in received] == ["\ufffd broken", "Fatal"]


def test_lines_of_an_earlier_attempt_are_not_repeated_and_a_log_may_begin_late(log: Path) -> None:
    received: Lines = []
    late = LogTail(log, len("old\n"), lambda *line: received.append(line))
    log.write_text("old\nnew\n")
    late.close()
    assert received == [(None, "host", "new")]


def test_a_failing_listener_gets_the_next_lines(log: Path) -> None:
    log.write_text("(engines[0] pid=1) one\n(engines[1] pid=2) two\n")
    received: list[str] = []

    def fails_first(_stage: str | None, _origin: str, text: str) -> None:
        received.append(text)
        if len(received) == 1:
            raise RuntimeError("no API")

    LogTail(log, 0, fails_first).close()
    assert received == ["one", "two"]


def test_a_log_that_is_renamed_is_followed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "POLL_SECONDS", 0.01)
    received, first = [], threading.Event()

    def listen(_stage: str | None, _origin: str, text: str) -> None:
        received.append(text)
        first.set()

    with log.open("a") as writer:
        print("before", file=writer, flush=True)
        tail = LogTail(log, 0, listen)
        assert first.wait(10)
        log.rename(log.with_name("other.log"))
        print("after", file=writer, flush=True)
    tail.close()
    assert received == ["before", "after"]


def test_the_newest_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        path = tmp_path / f"{number}.log"
        path.touch()
        os.utime(path, (time.time(), 1000 + number))
    (tmp_path / "prefect.log").touch()
    monkeypatch.setattr(logs, "KEPT", 2)
    prune_logs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4.log", "5.log", "prefect.log"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Loading weights took 0.1 seconds", logging.INFO),
        ("WARNING 11-21 [config.py:1] no swap", logging.WARNING),
        ("x.py:83: FutureWarning: deprecated", logging.WARNING),
        ("[W1121 15:05:16.58 utils.cpp:68] binding", logging.WARNING),
        ("Traceback (most recent call last):\n  File", logging.ERROR),
        ("torch.OutOfMemoryError: CUDA out of memory", logging.ERROR),
        ("2026-01-01 00:00:00,000 ERROR root: sft failed", logging.ERROR),
        ("Fatal Python error: Aborted", logging.ERROR),
    ],
)
def test_lines_get_the_log_level_that_their_text_suggests(text: str, expected: int) -> None:
    assert level(text) == expected
