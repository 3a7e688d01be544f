"""A run that trains under `align up` and ends badly: ways to end it, and the required recovery."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from alignment_core import journal
from tests.deployments.up import Services
from tests.processes import wait_until, wait_while_advancing

STEPS = 1000
"""Ten seconds or more of training, with a checkpoint each second: long enough to be ended in their middle on any machine."""
OVERRIDES = [
    "sft={data: {task: reverse, rows: 64}, training: {batch_size: 32, num_train_epochs: 500}}",
    f"sft.training.max_steps={STEPS}",
    "evaluation=null",
    "promotion=null",
    "resources={trainers: 1, engines: 1, threads: 1, progress_seconds: 0.1}",
]


def training(run_id: str) -> bool:
    """Whether the run has trained for long enough to have a checkpoint."""
    line = journal.stages(run_id).get("sft") if journal.folder_of(run_id).exists() else None
    progress = Path(os.environ["ALIGN_HOME"]) / "store" / "progress"
    return line is not None and line.state == "running" and any((progress / line.key).glob("step-*/complete.json"))


def steps(run_id: str) -> float:
    """Trained steps of the run's newest attempt; 0 before it trains."""
    seen = journal.progress(run_id).get("sft")
    return seen.done if seen else 0.0


def times_started(run_id: str, label: str) -> list[datetime]:
    lines = journal.news(journal.folder_of(run_id))
    return [
        datetime.fromisoformat(line["at"]) for line in lines if (line["label"], line["state"]) == (label, "running")
    ]


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


ENDS: dict[str, Callable[[Services, journal.RunRecord], None]] = {
    "SIGKILL of the flow": lambda _, record: os.kill(record.pid, signal.SIGKILL),
    "SIGTERM of the flow": lambda _, record: os.kill(record.pid, signal.SIGTERM),
    "SIGTERM of the worker": lambda services, _: os.kill(services.pid("worker"), signal.SIGTERM),
    "SIGKILL of worker and flow": lambda services, record: kill(services.pid("worker"), record.pid),
}


def check_that_it_goes_on(services: Services, end: str) -> tuple[float, float]:
    """Checks that it resumes from its checkpoint by itself, and no finished stage runs twice. Returns the seconds until it was
    marked as crashed, and from then until it trained again."""
    run_id = services.start_run([*OVERRIDES, f"seed={1 + list(ENDS).index(end)}"])
    watcher = services.watch("last")  # not begun yet
    assert wait_until(lambda: training(run_id), 120), services.states(run_id)
    ended, trained = time.time(), steps(run_id)
    ENDS[end](services, journal.read(run_id))
    assert wait_until(lambda: len(times_started(run_id, "sft")) == 2 and steps(run_id) > 0, 240), services.states(
        run_id
    )
    assert steps(run_id) >= trained  # an attempt first reports the step of its checkpoint
    assert wait_while_advancing(
        lambda: services.state(run_id) in ("Completed", "Failed"), lambda: steps(run_id), 120
    ), services.states(run_id)

    states = services.states(run_id)
    names = [name for name, _ in states]
    assert names[-1] == "Completed"
    assert "Crashed" in names
    assert "Resuming" in names
    assert len(times_started(run_id, "sft")) == 2
    done = [event for event in journal.news(journal.folder_of(run_id)) if event["state"] == "run"]
    ran = [line["label"] for line in done]  # the model may be that of an earlier run
    assert sorted({*ran, "model"}) == ["model", "sft", "sft/data"]
    assert len({*ran}) == len(ran), "no finished stage ran twice"

    watched, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    assert json.loads(watched) == {"run_id": run_id, "status": "completed", "attempt": 2, "message": None}

    crashed = next(at for name, at in states if name == "Crashed").timestamp()
    again = times_started(run_id, "sft")[1].timestamp()
    return crashed - ended, again - crashed
