"""Programs of completions, run for real: what passes, what does not, and what the hostile ones cannot do."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from alignment_core.errors import DataError, EnvironmentFault, Stopped
from alignment_core.evaluation import code_tests, sandbox, sandboxed
from alignment_core.evaluation.code_tests import CodeTests, code_of
from alignment_core.evaluation.rewards import verify
from alignment_core.evaluation.sandbox import Ended, run_program

DOUBLES = json.dumps({"tests": "assert double(2) == 4\nassert abs(double(-3) + 6) == 0"})
ADDS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})


def row(completion: str, label: str | None = DOUBLES) -> dict:
    return {"source": "p.jsonl:1", "task": None, "prompt_text": "?", "completion_text": completion, "label": label}


def run(program: str, seconds: float = sandbox.SECONDS) -> Ended:
    return run_program(program, "", threading.Event(), seconds=seconds)


@pytest.mark.parametrize(
    ("completion", "label", "score"),
    [
        ("def double(x): return 2 * x", DOUBLES, 1.0),
        ("def double(x): return 4", DOUBLES, 0.0),
        (
            "First\n```python\ndef double(x): return 0\n```\nno:\n```python\ndef double(x): return x + x\n```\n",
            DOUBLES,
            1.0,
        ),
        ("def double(x", DOUBLES, 0.0),
        ("print(sum(map(int, input().split())))", ADDS, 1.0),
        ("print(sum(map(int, open(0).read().split())), file=open('f', 'w'))\nprint(open('f').read())", ADDS, 1.0),
        ("print(3)", ADDS, 0.0),
        ("print(sum(map(int, input().split())))\nraise SystemExit(1)", ADDS, 0.0),
    ],
)
def test_a_program_passes_all_tests_or_not(completion: str, label: str, score: float) -> None:
    assert verify("code", [row(completion, label)]) == [score]


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import builtins; builtins.AssertionError = SystemExit; builtins.abs = lambda x: 0",
        "import builtins; builtins.exec = builtins.compile = builtins.print = lambda *a, **k: None",
        "import os; os.write(1, b'0' * 64); os._exit(0)",
        "import sys; sys.excepthook = lambda *a: None; __debug__",
        "import atexit, os; atexit.register(os._exit, 0); sys_exit = 0",
        "def double(x): raise SystemExit(0)",
    ],
)
def test_a_program_that_ends_before_the_tests_or_changes_what_they_use_does_not_pass(trick: str) -> None:
    tests = json.dumps({"tests": "assert abs(double(-3) + 6) == 0"})
    assert verify("code", [row(f"def double(x): return 5\n{trick}", tests)]) == [0.0]


@pytest.mark.parametrize("label", [None, "4", "{}", '{"tests": ""}', '{"inputs": ["1"], "outputs": []}'])
def test_a_label_without_tests_is_a_failure_and_not_a_wrong_answer(label: str | None) -> None:
    with pytest.raises(DataError, match=r"^p\.jsonl:1: the verifier code failed: the label is no `\{\"tests\": "):
        verify("code", [row("def double(x): return 2 * x", label)])


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


def test_a_program_sees_no_secret_and_no_file_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    (tmp_path / "secret").write_text("hidden")
    assert b"hidden" not in run("import os; print(dict(os.environ))").output
    for path in (tmp_path / "secret", "/etc/passwd", f"/proc/{os.getpid()}/environ", Path(__file__)):
        assert run(f"print(open({str(path)!r}).read())").code == 1
    assert run(f"import os; print(os.listdir({str(tmp_path)!r}))").code == 1


def test_a_program_writes_in_its_folder_alone_and_nothing_of_it_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for attack in ("open({}, 'w')", "os.remove({})", "os.rename({}, 'x')", "os.chmod({}, 0)", "os.truncate({}, 0)"):
        assert run("import os; " + attack.format(repr(str(tmp_path / "kept")))).code == 1, attack
    assert run(f"open({str(tmp_path / 'new')!r}, 'w')").code == 1
    assert [(one.name, one.read_text(), one.stat().st_mode & 0o777) for one in tmp_path.iterdir()] == [
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


def test_a_program_takes_no_more_memory_disk_or_output_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("x = bytearray(3 << 30)").code == 1
    assert run("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))").code == 1
    printed = run("while True: print('x' * 100000)")
    assert (printed.code, len(printed.output)) == (1, sandboxed.FILE_BYTES)
    many = "while True:\n    for n in range(40): open(str(n), 'wb').write(bytes(1 << 22))"
    monkeypatch.setattr(sandbox, "LOOK_SECONDS", 0.01)
    assert run(many).code is None


def test_a_program_that_loops_or_sleeps_is_ended() -> None:
    started = time.monotonic()
    assert run("while True: pass", seconds=1.0).code is None
    assert run("import time; time.sleep(600)", seconds=1.0).code is None
    assert time.monotonic() - started < 8


@pytest.mark.slow
def test_a_program_has_seconds_of_the_processor() -> None:
    assert run("while True: pass", seconds=300.0).code == -9, "ended by the kernel, before its wall time"


def test_closing_ends_the_programs_that_run() -> None:
    tests = CodeTests("evaluation.verifier")
    threading.Timer(0.5, tests.close).start()
    with pytest.raises(Stopped):
        list(tests([("import time; time.sleep(600)", DOUBLES)] * 3))
    running = [one for one in psutil.Process().children(recursive=True) if sandboxed.__file__ in one.cmdline()]
    assert not running


def test_a_machine_without_the_means_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "sandboxed.py"
    other.write_text(Path(sandboxed.__file__).read_text().replace(" 444,", " 9999,"))  # no such system call
    monkeypatch.setattr(sandboxed, "__file__", str(other))
    with pytest.raises(
        EnvironmentFault, match=r"^evaluation\.verifier: `code` a program cannot be run .*: Landlock: Function"
    ):
        CodeTests("evaluation.verifier")


def test_code_is_the_last_fenced_block_or_everything() -> None:
    assert code_of("a = 1") == "a = 1"
    assert code_of("```python\na\n```\n```\nb\n```") == "a\n"
    assert code_of("```py\na\n```\nand\n```Python\nb\n```") == "b\n"


def test_all_inputs_of_a_program_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "SECONDS", 3.0)
    label = json.dumps({"inputs": ["1"] * 20, "outputs": ["1"] * 20})
    (_, score), *_ = CodeTests("evaluation.verifier")([("import time; time.sleep(1); print(input())", label)])
    assert score == 0.0, "each alone would pass"
