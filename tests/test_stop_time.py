"""The time that a run has to save its progress when it is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from alignment_core import journal, stop_time
from alignment_core.host.server import Server
from alignment_core.host.subprocess_tree import Supervised, fresh_folder
from alignment_core.recipes import ResourcesConfig
from tests.test_journal import record

RECIPE = {"resources": {"stop_seconds": 20.0}}


def server(home: Path, temporary: Path) -> Server:
    return Server(None, str(home / "store"), ResourcesConfig(), temporary, prewarm=())  # type: ignore[arg-type]


def test_stopping_takes_three_times_the_longest_save_and_at_least_stop_seconds(tmp_path: Path) -> None:
    assert stop_time.extended(20.0, tmp_path) == 20.0
    stop_time.note(tmp_path, 5.0)
    assert stop_time.extended(20.0, tmp_path) == 20.0
    stop_time.note(tmp_path, 100.0)
    stop_time.note(tmp_path, 50.0)  # of another stage
    assert stop_time.extended(20.0, tmp_path) == 300.0
    assert stop_time.extended(0.0, tmp_path) == 0.0, "0 ends a run at once"


@pytest.mark.parametrize("content", [b"", b"\xff", b"soon"])
def test_a_damaged_note_counts_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "stop-seconds").write_bytes(content)
    assert stop_time.extended(20.0, tmp_path) == 20.0


def test_a_folder_that_is_gone_fails_no_run(tmp_path: Path) -> None:
    stop_time.note(tmp_path / "gone", 100.0)
    assert not (tmp_path / "gone").exists()


def test_the_host_tells_its_supervisors_and_the_journal_how_long_saving_and_pushing_take(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("worker", "host"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(stop_time.SUPERVISORS, os.pathsep.join(str(tmp_path / name) for name in ("worker", "host")))
    with journal.Journal(record("a1", recipe=RECIPE)).open():
        host = server(home, tmp_path / "host")
        for part, seconds in (("save", 10.0), ("save", 8.0), ("push", 30.0)):
            host._note_save("a1", part, seconds)
        assert journal.stop_seconds(journal.read("a1")) == 120.0
    assert [stop_time.extended(1.0, tmp_path / name) for name in ("worker", "host")] == [120.0, 120.0]
    assert not list((home / "runs").glob("stop-seconds*")), "without a run there is no journal"
    host._note_save("", "save", 100.0)
    assert not list((home / "runs").glob("stop-seconds*"))


def test_a_run_without_a_save_has_the_recipes_time(home: Path) -> None:
    with journal.Journal(record("a1", recipe=RECIPE)).open():
        assert journal.stop_seconds(journal.read("a1")) == 20.0


def test_every_supervised_process_knows_all_supervisors_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = tmp_path / "outer", fresh_folder(tmp_path, "r")
    monkeypatch.setenv(stop_time.SUPERVISORS, str(outer))
    shown = tmp_path / "shown"
    code = f"from alignment_core import stop_time; open({str(shown)!r}, 'w').write(repr(stop_time.supervisors()))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    supervised = Supervised([sys.executable, "-c", code], environment, tmp_path / "log", inner)
    supervised.process.wait(60)
    supervised.close()
    assert shown.read_text() == repr([outer, inner]), (tmp_path / "log").read_text()


def test_the_supervisor_still_starts_without_heavy_imports() -> None:
    code = "import sys, alignment_core.host.supervisor; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
