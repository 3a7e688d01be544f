"""Limits on hostile programs: reading, writing, network, processes, resources and time."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import alignment_core
from alignment_core.rewards.sandbox import process as sandboxed
from alignment_core.rewards.sandbox import runner as sandbox
from alignment_core.rewards.sandbox import system_calls
from alignment_core.rewards.sandbox.runner import Ended, run_program


def run(program: str, seconds: float = sandbox.SECONDS) -> Ended:
    return run_program(program, "", threading.Event(), seconds=seconds)


def test_a_program_reads_only_the_libraries_of_an_installation() -> None:
    """Images have projects, with their data and secrets, in /usr/src, /usr/local or beside a virtual environment's `lib`."""
    assert run("import platform, encodings.idna; platform.platform()").code == 0
    if os.path.isdir("/usr/share/zoneinfo"):
        assert run("import zoneinfo; zoneinfo.ZoneInfo('Europe/Paris')").code == 0
    assert run("import json; open(json.__file__).read()").code == 0
    for path in (
        "/usr",
        "/usr/bin/env",
        "/usr/local",
        "/usr/src",
        sys.prefix,
        f"{sys.prefix}/pyvenv.cfg",
        sys.base_prefix,
    ):
        reading = f"import os\nos.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r})"
        assert run(reading).code == 1, path


@pytest.fixture
def server() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        yield listening, listening.getsockname()[1]


def test_a_program_reaches_no_network(server: tuple[socket.socket, int]) -> None:
    listening, port = server
    assert run(f"import socket; socket.create_connection(('127.0.0.1', {port}))").code == 1
    with pytest.raises(TimeoutError):
        listening.accept()
    assert run("import socket; socket.socketpair(type=socket.SOCK_DGRAM)").code == 1
    assert run("import asyncio; asyncio.run(asyncio.sleep(0))").code == 0


def test_a_program_sees_no_secrets_and_no_files_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    (tmp_path / "secret").write_text("hidden")
    assert b"hidden" not in run("import os; print(dict(os.environ))").output
    for path in (tmp_path / "secret", "/etc/passwd", f"/proc/{os.getpid()}/environ", Path(__file__)):
        assert run(f"print(open({str(path)!r}).read())").code == 1
    assert run(f"import os; print(os.listdir({str(tmp_path)!r}))").code == 1


def test_a_program_writes_only_in_its_folder_and_the_folder_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for attack in ("open({}, 'w')", "os.remove({})", "os.rename({}, 'x')", "os.chmod({}, 0)", "os.truncate({}, 0)"):
        assert run("import os; " + attack.format(repr(str(tmp_path / "kept")))).code == 1, attack
    assert run(f"open({str(tmp_path / 'new')!r}, 'w')").code == 1
    assert [(file.name, file.read_text(), file.stat().st_mode & 0o777) for file in tmp_path.iterdir()] == [
        ("kept", "kept", 0o644)
    ]
    folder = run("import os; open('left', 'w').write('x'); print(os.getcwd())").output.decode().strip()
    assert folder
    assert not os.path.exists(folder)


def test_a_program_starts_no_process_signals_none_and_raises_no_limit() -> None:
    bomb = "import os, sys\ntry:\n    for _ in range(8): os.fork()\nexcept OSError: sys.exit(7)"
    assert run(bomb).code == 7
    for attack in (
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; p = m.Process(target=print); p.start()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import fcntl, os, socket; fcntl.fcntl(socket.socketpair()[0], fcntl.F_SETOWN, os.getppid())",
        "import fcntl, os, socket; fcntl.ioctl(socket.socketpair()[0], 0x8901, os.getppid().to_bytes(4, 'little'))",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (8, 8))",
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ):
        assert run(attack).code == 1, attack


def test_memory_disk_and_output_of_a_program_are_bounded() -> None:
    assert run("x = bytearray(3 << 30)").code == 1
    assert run("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))").code == 1
    printed = run("while True: print('x' * 100000)")
    assert (printed.code, len(printed.output)) == (1, sandboxed.FILE_BYTES)
    for files in (
        "n = os.open(str(n), os.O_RDWR | os.O_CREAT); os.ftruncate(n, 4096); os.unlink(str(n)) if 0 else None",
        "os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))",
        "f = open('f', 'wb+'); os.unlink('f'); f.write(b'x'); f.flush(); kept.append(mmap.mmap(f.fileno(), 1)); f.close()",
    ):
        attack = "import mmap, os, sys\nkept, n = [], 0\ntry:\n  for n in range(999): FILES\nexcept OSError: print(n)"
        ended = run(attack.replace("FILES", files))
        assert (ended.code, int(ended.output) <= sandbox.FILES) == (0, True), files
    assert run("import os; os.posix_fallocate(os.open('f', os.O_RDWR | os.O_CREAT), 0, 4096)").code == 1


def test_a_program_starts_so_many_threads_and_no_more() -> None:
    pool = "from concurrent.futures import ThreadPoolExecutor as P\nwith P(8) as p: print(sum(p.map(len, ['ab'] * 32)))"
    assert run(pool) == Ended(0, b"64\n")
    bomb = """
import os, threading
threading.stack_size(1 << 15)
started, wait = 0, threading.Event()
try:
    while started < 5000:
        threading.Thread(target=wait.wait, daemon=True).start()
        started += 1
except RuntimeError: pass
print(started, flush=True)
os._exit(0)
"""
    assert run(bomb) == Ended(0, f"{sandbox.THREADS}\n".encode())


def test_unknown_system_calls_are_refused() -> None:
    """Old ones that user listed, those of newer kernels (setxattrat, file_setattr), those to come."""
    attack = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps([n for n in CALLS if libc.syscall(n, -1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38]))
"""
    known = {system_calls.number_of(call, system_calls.MACHINES[platform.machine()]) for call in system_calls.NUMBERS}
    probes = (335, 336)  # uretprobe and uprobe, which the kernel allows for itself, and kills other callers
    calls = [number for number in (*range(700), 1 << 20, 0x40000000) if number not in {*known, *probes}]
    ended = run(attack.replace("CALLS", repr(calls)))
    assert (ended.code, json.loads(ended.output)) == (0, [])


def test_a_program_that_loops_or_sleeps_is_ended() -> None:
    started = time.monotonic()
    assert run("while True: pass", seconds=1.0).code is None
    assert run("import time; time.sleep(600)", seconds=1.0).code is None
    assert time.monotonic() - started < 300, "it did not sleep to its end"


@pytest.mark.slow
def test_a_program_has_seconds_of_the_processor() -> None:
    assert run("while True: pass", seconds=300.0).code == -9, "ended by the kernel, before its wall time"


@pytest.mark.skipif(os.geteuid() != 0, reason="every test here runs as another user than root")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="needs a Python that any user can start")
def test_limits_hold_for_another_user_than_root() -> None:
    script = """import threading, os
from alignment_core.rewards.sandbox.runner import check_limits, passes_tests
check_limits(threading.Event())
assert passes_tests("def f(): return 1", "assert f() == 1", threading.Event())
print(os.geteuid())"""
    python = "/usr/bin/python3"  # ours, and this tree, may be in a folder that only root can read
    user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(Path(alignment_core.__file__).parent, f"{place}/alignment_core")
        os.chmod(place, 0o755)
        ran = subprocess.run([python, "-c", script], env={"PYTHONPATH": place}, capture_output=True, text=True, **user)
    assert ran.stdout == "65534\n", ran.stderr
