"""The folder of a supervised command: removed however the command ended, without touching other folders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core.host import supervisor
from alignment_core.host.subprocess_tree import fresh_folder
from alignment_core.host.supervisor import IN_USE, discard
from alignment_core.stop_time import note
from tests.processes import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The leftovers of a command killed long ago: its mark, which is unlocked, and a file."""
    folder = fresh_folder(tmp_path, "r")
    (folder / IN_USE).touch()
    (folder / "session").mkdir()
    (folder / "session" / "log").write_text("the last words")
    os.utime(folder, (0, 0))
    return folder


def test_folders_of_killed_commands_are_removed_at_the_next_start(folder: Path, tmp_path: Path) -> None:
    others = tmp_path / "r-of-somebody-else"
    others.mkdir()
    os.utime(others, (0, 0))
    young = fresh_folder(tmp_path, "r")
    assert set(tmp_path.iterdir()) == {others, young}


def test_the_mark_stays_during_writes_so_that_a_later_start_removes_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.shutil, "rmtree", lambda *_, **__: None)  # as if a new file came for each that goes
        discard(folder)
    assert (folder / IN_USE).exists()
    os.utime(folder, (0, 0))
    fresh_folder(tmp_path, "r")
    assert not folder.exists()


def test_a_folder_without_a_mark_is_removed(tmp_path: Path) -> None:
    never_started = fresh_folder(tmp_path, "r")
    discard(never_started)
    discard(never_started)  # may be called again
    assert not never_started.exists()


RUN = """
import signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep(1.5)  # longer than what is left of a command usually has here
    Path(sys.argv[1]).write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1]).write_text("works")
time.sleep(600)
"""
WORKER = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]]); time.sleep(600)"
)
IMPATIENT = """
import sys
from alignment_core.host import supervisor
supervisor.TERM_SECONDS = 0.2
supervisor.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("given", "noted", "left"),
    [("60", 0.0, "saved"), ("0.1", 20.0, "saved"), ("0.1", 0.0, "works"), ("0", 20.0, "works")],
)
def test_children_that_outlive_a_terminated_command_have_time_to_save(
    given: str, noted: float, left: str, tmp_path: Path
) -> None:
    """As a worker's runs: Prefect's worker does not wait for them. They have the time given or, if they noted that saving takes
    long, three times that; given 0, they have none."""
    read_end, lifeline = os.pipe()
    folder, work = fresh_folder(tmp_path, "s-"), tmp_path / "work"
    command = [sys.executable, "-c", WORKER, RUN, str(work)]
    settings = [str(read_end), str(folder), "", "60", given]
    supervised = subprocess.Popen([sys.executable, "-c", IMPATIENT, *settings, *command], pass_fds=[read_end])
    os.close(read_end)
    assert wait_until(lambda: work.exists() and work.read_text() == "works", 30)
    if noted:
        note(folder, noted)
    os.close(lifeline)
    supervised.wait(60)
    assert work.read_text() == left
