"""The folder of a supervised command: none stays for ever, whatever ended the command, and nobody else's is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from alignment_core.host import supervisor
from alignment_core.host.supervised import fresh_folder
from alignment_core.host.supervisor import IN_USE, discard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a command that was killed long ago left: its mark, which nobody locks, and a file."""
    folder = fresh_folder(tmp_path, "r")
    (folder / IN_USE).touch()
    (folder / "session").mkdir()
    (folder / "session" / "log").write_text("the last words")
    os.utime(folder, (0, 0))
    return folder


def test_what_a_killed_command_left_goes_when_the_next_one_starts(folder: Path, tmp_path: Path) -> None:
    others = tmp_path / "r-of-somebody-else"
    others.mkdir()
    os.utime(others, (0, 0))
    young = fresh_folder(tmp_path, "r")
    assert set(tmp_path.iterdir()) == {others, young}


def test_while_something_still_writes_the_mark_stays_so_that_a_later_start_removes_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.shutil, "rmtree", lambda *_, **__: None)  # as if a new file came for each that goes
        discard(folder)
    assert (folder / IN_USE).exists()
    os.utime(folder, (0, 0))
    fresh_folder(tmp_path, "r")
    assert not folder.exists()


def test_a_folder_that_never_had_a_mark_goes_too(tmp_path: Path) -> None:
    never_started = fresh_folder(tmp_path, "r")
    discard(never_started)
    discard(never_started)  # may be called again
    assert not never_started.exists()
