"""A user's flow under `align up` resumes by itself after its process dies; a cancelled one can be resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from alignment_core import journal
from tests.deployments.endings import times_started
from tests.deployments.up import Services
from tests.pages import DOCS, files_of
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BRANCH = "beta-0.3/dpo"


def test_a_killed_deployed_flow_continues_and_a_cancelled_flow_waits_to_be_resumed(
    services: Services, tmp_path: Path
) -> None:
    (tmp_path / "two_betas.py").write_text(files_of(DOCS / "flows.md")["two_betas.py"])
    services.align("deploy", "two_betas.py", "--name", "betas", "--set", "betas=[0.3]", folder=tmp_path)
    printed = services.prefect("deployment", "run", "alignment/betas")
    run_id = next(word for word in printed.split() if word.count("-") == 4)

    assert wait_until(lambda: trains(run_id, 1), 240), services.states(run_id)
    os.kill(journal.read(run_id).pid, signal.SIGKILL)
    assert wait_until(lambda: trains(run_id, 2), 240), services.states(run_id)
    assert "Resuming" in [name for name, _ in services.states(run_id)]

    services.prefect("flow-run", "cancel", run_id)
    assert wait_until(lambda: services.state(run_id) == "Cancelled", 120), services.states(run_id)
    refused = services.align("resume", run_id, "--from-stage", "pairs", expect=2)
    assert "the deployed flow has no parameter `from_stage`" in refused["error"]
    services.align("resume", run_id)
    assert wait_until(lambda: services.state(run_id) == "Completed", 240), services.states(run_id)
    ran = [line["label"] for line in journal.news(journal.folder_of(run_id)) if line["state"] == "run"]
    assert (ran.count("sft"), ran.count(BRANCH)) == (1, 1), "nothing that was done is done again"


def trains(run_id: str, times: int) -> bool:
    """Whether the branch is under way for the so-many-th time."""
    if not journal.folder_of(run_id).exists() or len(times_started(run_id, BRANCH)) < times:
        return False
    line = journal.stages(run_id).get(BRANCH)
    return line is not None and line.state == "running"
