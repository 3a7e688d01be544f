"""Real nights that are stopped ten times at random moments: the rows wait, are trained on once, and nothing is given up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli.run import NOT_PROMOTED
from alignment_core.artifacts import open_store
from alignment_core.data.rows_file import ROWS
from alignment_core.nights.ledger import History
from tests.flows.test_nightly import JUDGE, RECIPE
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STOPS = 10
KINDS = (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
"""In turn. Eight orderly stops would have lost the rows twice over; two deaths are fewer than rows survive."""
LONGEST = 12.0
"""Seconds after the claim at which a night is stopped at the latest."""


def has_more_than(count: int, history: History) -> bool:
    return len(history.nights()) > count


def test_rows_of_nights_that_are_stopped_ten_times_are_trained_on_once(tmp_path: Path, prefect_api: Any) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(200, 216)))
    (tmp_path / "nightly.yaml").write_text(RECIPE.format(home=tmp_path))
    command = [sys.executable, "-m", "alignment.flows.cli.main", "run", str(tmp_path / "nightly.yaml")]
    environment = {**os.environ, **prefect_api, "ALIGN_HOME": str(tmp_path)}
    history, rng, stopped, dropped = History(open_store(tmp_path / "store"), "owl"), random.Random(10), 0, 0

    for attempt in range(3 * STOPS):
        if stopped == STOPS:
            break
        with (tmp_path / "inbox" / "rows.jsonl").open("a") as file:
            for _ in range(8):
                file.write(json.dumps({"prompt": f"{dropped}?", "chosen": "aaaaaa", "rejected": "bbbbbb"}) + "\n")
                dropped += 1
        known = len(history.nights())
        with (tmp_path / "log").open("ab") as log:
            night = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        assert wait_until(partial(has_more_than, known, history), 120), (tmp_path / "log").read_text()
        time.sleep(rng.uniform(0.0, LONGEST))
        night.send_signal(KINDS[attempt % len(KINDS)])
        stopped += night.wait(120) != 0
    while history.nights()[-1].state != "empty":
        assert subprocess.run(command, env=environment, check=False).returncode in (0, NOT_PROMOTED)

    entries = history.nights()
    states = [(entry.night, entry.state, entry.failed_attempts) for entry in entries]
    assert stopped == STOPS, states
    assert "given_up" not in [entry.state for entry in entries], states
    assert {entry.state for entry in history.batches()} <= {"promoted", "refused"}, states
    batches = [
        (history.store.fetch(entry.batch) / ROWS).read_text().splitlines() for entry in history.batches() if entry.batch
    ]
    assert sorted(int(json.loads(line)["prompt"][:-1]) for lines in batches for line in lines) == [*range(dropped)]
    promoted = [entry for entry in history.batches() if entry.state == "promoted"]
    assert len(history.store.tags.history("policy/production")) == len(promoted)
