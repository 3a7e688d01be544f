"""One folder and one id per run: kept over a crash, not shared with a running run, new after success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.tracking.folder import run_folder
from tests.tracking.watched import recipe_with

HOLDER = """
import time
from alignment_core.tracking.folder import run_folder
from tests.tracking.watched import recipe_with
with run_folder(recipe_with({})) as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


pytestmark = pytest.mark.usefixtures("home")


def test_a_killed_run_gives_its_folder_to_the_next_and_only_then() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], env=dict(os.environ), stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    first = Path(holder.stdout.readline().strip())
    assert first.is_dir()
    with run_folder(recipe_with({})) as beside:
        assert beside != first
    holder.send_signal(signal.SIGKILL)
    holder.wait(30)
    with run_folder(recipe_with({})) as again:
        assert again == first


def test_a_failed_run_continues_in_its_folder_and_a_run_after_success_has_another(home: Path) -> None:
    with pytest.raises(RuntimeError), run_folder(recipe_with({})) as failed:
        raise RuntimeError
    with run_folder(recipe_with({})) as succeeded:
        assert succeeded == failed
        assert succeeded.parent == home / "tracking"
    with run_folder(recipe_with({})) as next_one:
        assert next_one != failed
        assert next_one.name.startswith("small-")


def test_resources_and_trackers_do_not_change_the_identity_of_a_run() -> None:
    with pytest.raises(RuntimeError), run_folder(recipe_with({})) as failed:
        raise RuntimeError
    with run_folder(recipe_with({"tensorboard": True}, resources={"trainers": 1})) as same:
        assert same == failed
    with run_folder(recipe_with({}, seed=1)) as other:
        assert other.name.split("-")[1] != failed.name.split("-")[1]
