"""The pretrained model of the tests is made once, whole or not at all, and needs no network afterwards."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import real_model
from tests.real_model import RealModelError, once

MAKER = """
import subprocess, sys
from pathlib import Path
from tests.real_model import once

folder = Path(sys.argv[1])
WAIT = "import sys, time, pathlib\\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"

def make(work, lock):
    (work / "done").mkdir(parents=True)
    (work / "done" / "first").write_text("1")
    with (folder.parent / "log").open("a") as log:
        log.write("begun, ")
    subprocess.run([sys.executable, "-c", WAIT, folder.parent / "continue"], pass_fds=[lock], check=True)
    (work / "done" / "second").write_text("2")

print(*sorted(path.name for path in once(folder, make).iterdir()))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "key"
    (tmp_path / "continue").touch()


def begin(folder: Path) -> subprocess.Popen[str]:
    """Make the folder in a process of its own, whose child waits for the file ``continue``."""
    return subprocess.Popen(
        [sys.executable, "-c", MAKER, str(folder)], cwd=real_model.ROOT, stdout=subprocess.PIPE, text=True
    )


def log(folder: Path) -> str:
    file = folder.with_name("log")
    return file.read_text() if file.exists() else ""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()} - {"log", "continue"}


def test_two_processes_at_once_make_it_once(folder: Path) -> None:
    both = [begin(folder) for _ in range(2)]
    while not log(folder):
        time.sleep(0.01)
    folder.with_name("continue").touch()
    assert [process.communicate(timeout=60)[0] for process in both] == ["first second\n"] * 2
    assert log(folder) == "begun, "
    assert names(folder) == {"key", "key.lock"}


def test_what_a_killed_process_left_is_made_anew_once_its_children_have_ended(folder: Path) -> None:
    killed = begin(folder)
    while not log(folder):
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    with folder.with_suffix(".lock").open("w") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert names(folder) == {"key.new", "key.lock"}
    folder.with_name("continue").touch()
    assert begin(folder).communicate(timeout=60)[0] == "first second\n"
    assert log(folder) == "begun, begun, "
    assert names(folder) == {"key", "key.lock"}


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(work: Path, lock: int) -> None:
        (work / "done").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    with pytest.raises(RealModelError, match=r"No space left on device\. Set XDG_CACHE_HOME to another folder"):
        once(tmp_path / "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_where_it_is_there_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(real_model, "_run", None)
    folder = tmp_path / "alignment" / "real-model" / real_model._key() / real_model.NAME
    folder.mkdir(parents=True)
    assert real_model.real_model() == folder


@pytest.mark.parametrize("cache", [None, "", "relative"])
def test_it_lies_in_the_cache_folder_of_the_user(
    cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The XDG specification has paths that are not absolute ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert real_model._models() == tmp_path / ".cache" / "alignment" / "real-model"


def test_without_a_package_index_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.real_model"],
        cwd=real_model.ROOT,
        env={**os.environ, **nowhere, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "No matching distribution found for gguf" in done.stderr
    assert "Let pip reach a package index" in done.stderr
    assert str(tmp_path / "cache" / "alignment" / "real-model") in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert [path.suffix for path in (tmp_path / "cache" / "alignment" / "real-model").iterdir()] == [".lock"]


@pytest.mark.real
@pytest.mark.slow
def test_who_may_read_it_depends_on_the_umask_alone() -> None:
    folder = real_model.real_model()
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {folder.stat().st_mode & 0o666}
    assert folder.stat().st_mode == folder.parent.stat().st_mode
