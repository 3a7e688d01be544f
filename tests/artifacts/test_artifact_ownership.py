"""What code is read from was written by this user or by root: progress and Prefect's results."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from alignment_core.artifacts import align_home
from alignment_core.artifacts.ownership import check_ours, make_private
from alignment_core.errors import EnvironmentFault

KEY = "a" * 64
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


def test_progress_and_results_are_closed_to_others_also_those_of_before(store):
    (store.workspace.all_progress / KEY).mkdir(parents=True, mode=0o775)
    before = os.umask(0o002)
    try:
        for directory in (store.progress(KEY), store.progress("b" * 64), store.workspace.results):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert store.workspace.results.name == str(os.geteuid())
    with store.claim(KEY) as progress:
        assert stat.S_IMODE(progress.stat().st_mode) == 0o700


@AS_ROOT
def test_what_somebody_else_made_is_not_read(store, monkeypatch):
    theirs = store.progress(KEY)
    (theirs / "state").write_bytes(b"a pickle")
    os.chown(theirs / "state", 4242, 4242)
    with pytest.raises(
        EnvironmentFault, match=r"state belongs to user 4242, and what somebody else wrote there is not"
    ):
        check_ours(theirs)
    os.chown(theirs, 4242, 4242)
    with pytest.raises(EnvironmentFault, match=rf"{KEY} belongs to user 4242"), store.claim(KEY):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert make_private(theirs) == check_ours(theirs) == theirs


def test_the_home_is_closed_to_others(tmp_path, monkeypatch):
    def mode(name: str) -> int:
        monkeypatch.setenv("ALIGN_HOME", str(tmp_path / name))
        return stat.S_IMODE(align_home().stat().st_mode)

    (tmp_path / "before" / "store").mkdir(parents=True)
    (tmp_path / "shared" / "photos").mkdir(parents=True)
    for name in ("before", "shared"):
        (tmp_path / name).chmod(0o755)
    assert (mode("new/home"), mode("before")) == (0o700, 0o700)
    assert mode("shared") == 0o755, "it holds what is none of ours"


def test_a_directory_that_goes_while_it_is_made_private_is_made_again(store, monkeypatch):
    lstat = Path.lstat

    def gone_first(path):
        monkeypatch.undo()
        path.rmdir()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", gone_first)
    assert store.progress(KEY).is_dir()
