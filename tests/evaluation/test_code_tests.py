"""Programs of completions, run for real: what passes, what does not, and what the hostile ones cannot do."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import alignment_core
from alignment_core.errors import DataError, EnvironmentFault, Stopped
from alignment_core.evaluation import code_tests, sandbox, sandboxed, system_calls
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
        "def abs(x): return 0",
        "__builtins__ = {'abs': lambda x: 0}",
        "import math\nclass Zero:\n __sub__ = __add__ = __abs__ = lambda *a: 0\ndef double(x): return Zero()",
        "class Same:\n __eq__ = lambda *a: True\n __add__ = __abs__ = lambda s, *a: s\ndef double(x): return Same()",
        "import sys\ndef double(x): return -sys._getframe(1).f_code.co_consts[1]",
        "import gc\ndef double(x): return -next(o['six'] for o in gc.get_objects() if type(o) is dict and 'six' in o)",
        "import json, os\nfor fd in range(3, 64):\n for told in ({'gives': 0}, {'gives': ['dict', []]}):\n"
        "  try: os.write(fd, json.dumps(told).encode() + b'\\n')\n  except OSError: pass",
    ],
)
def test_a_program_that_ends_before_the_tests_or_changes_what_they_use_does_not_pass(trick: str) -> None:
    tests = json.dumps({"tests": "six = 6\nassert abs(double(-3) + six) == 0"})
    assert verify("code", [row(f"def double(x): return 5\n{trick}", tests)]) == [0.0]


def test_no_program_finds_the_verdict_in_its_frames() -> None:
    """Tests and program in one interpreter: the one that runs both has the verdict's descriptor and secret."""
    trick = """
import os, sys
frame = sys._getframe()
while frame := frame.f_back:
    if "token" in frame.f_locals:
        os.write(frame.f_locals["verdict"], frame.f_locals["token"]); os._exit(0)
"""
    assert verify("code", [row(f"def double(x): return 5\n{trick}")]) == [0.0]


def test_a_program_that_ends_passes_no_test_that_expects_an_error() -> None:
    tests = json.dumps({"tests": "try: double(2)\nexcept BaseException: pass"})
    assert verify("code", [row("import os\ndef double(x): os._exit(0)", tests)]) == [0.0]


PROGRAM = """
import collections, datetime, math
from fractions import Fraction
LIMIT = 7
class TooMany(ValueError): pass
class Point(collections.namedtuple("Point", "x y")): pass
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, one, times=1):
        if len(self.items) + times > LIMIT: raise TooMany("full", LIMIT)
        self.items += [one] * times
        return self
    def __len__(self): return len(self.items)
    def __getitem__(self, place): return self.items[place]
    def __iter__(self): yield from self.items
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
def turn(items): items.reverse()
def each(of, items): return [of(one) for one in items]
def length(node): return 0 if node is None else 1 + length(node.after)
def squares(n):
    for k in range(n): yield k * k
def values(): return [(1, 2.5), {3}, b"4", {"5": None}, 1 << 99, 6j, Fraction(1, 3), datetime.date(2020, 1, 2), float("inf")]
def counted(text): return collections.Counter(text)
"""
TESTS = """
from answer import squares
assert LIMIT == 7 and math.isclose(values()[0][1], 2.5)
assert values() == [(1, 2.5), {3}, b"4", {"5": None}, 1 << 99, 6j, Fraction(1, 3), datetime.date(2020, 1, 2), float("inf")]
stack = Stack([1]).push(2, times=2)
assert len(stack) == 3 and list(stack) == [1, 2, 2] and stack[-1] == 2 and stack[1:] == [2, 2] and stack.items == [1, 2, 2]
assert 2 in stack and stack == Stack([1, 2, 2]) and stack != Stack() and isinstance(stack, Stack) and stack and not Stack()
assert not isinstance(3, Stack) and stack != [1, 2, 2]
try: stack.push(3, times=9)
except TooMany as error: assert error.args == ("full", 7) and isinstance(error, ValueError)
else: assert False
items = [1, 2, 3]
assert turn(items) is None and items == [3, 2, 1]
assert each(lambda one: one * 2, items) == [6, 4, 2] and each(str, [1]) == ["1"]
class Node:
    def __init__(self, after): self.after = after
assert length(Node(Node(None))) == 2
assert list(squares(4)) == [0, 1, 4, 9] and next(iter(squares(1))) == 0
assert counted("aab").most_common(1) == [("a", 2)] and counted("a") == {"a": 1}
point = Point(3, 4)
assert point == (3, 4) and point.x == 3 and point + (5,) == (3, 4, 5)
"""


def test_tests_call_a_program_in_another_process_as_if_it_were_in_theirs() -> None:
    label = json.dumps({"tests": TESTS})
    assert verify("code", [row(PROGRAM, label)]) == [1.0]
    assert verify("code", [row(PROGRAM.replace("k * k", "k + k"), label)]) == [0.0]


def test_a_program_sees_nothing_of_its_tests_but_what_they_pass() -> None:
    program = """
def looks(node, function):
    for of, name in ((node, "_hidden"), (node, "__class__"), (function, "gi_frame"), (function, "__globals__")):
        try: found = getattr(of, name)
        except AttributeError: continue
        if name != "__class__" or found.__name__ == "Node": return "saw " + name
    return node.shown
"""
    tests = """
class Node: shown, _hidden = "nothing", "secret"
assert looks(Node(), (one for one in [1])) == looks(Node(), lambda: None) == "nothing"
"""
    assert verify("code", [row(program, json.dumps({"tests": tests}))]) == [1.0]


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


def test_a_program_takes_no_more_memory_disk_or_output_than_it_may() -> None:
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


def test_no_system_call_passes_that_is_not_known() -> None:
    """Old ones that nobody listed, those of newer kernels (setxattrat, file_setattr), those to come."""
    attack = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps([n for n in CALLS if libc.syscall(n, -1, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 38]))
"""
    known = {system_calls.number_of(call, system_calls.MACHINES[platform.machine()]) for call in system_calls.NUMBERS}
    probes = (335, 336)  # uretprobe and uprobe, which the kernel lets pass for itself, and kills who calls them
    calls = [number for number in (*range(700), 1 << 20, 0x40000000) if number not in {*known, *probes}]
    ended = run(attack.replace("CALLS", repr(calls)))
    assert (ended.code, json.loads(ended.output)) == (0, [])


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
    started = psutil.Process().children(recursive=True)
    alive = [one for one in started if one.status() != psutil.STATUS_ZOMBIE]  # another test's may not be reaped yet
    assert not [one for one in alive if sandboxed.__file__ in one.cmdline()]


def test_a_machine_without_the_means_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "sandboxed.py"
    other.write_text(Path(sandboxed.__file__).read_text().replace("= 444,", "= 9999,"))  # no such system call
    monkeypatch.setattr(sandboxed, "__file__", str(other))
    with pytest.raises(
        EnvironmentFault, match=r"^evaluation\.verifier: `code` a program cannot be run .*: Landlock: Function"
    ):
        CodeTests("evaluation.verifier")


def test_another_machine_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        EnvironmentFault,
        match=r"^evaluation\.verifier: `code` runs programs on 64-bit Linux on x86_64 or aarch64, and this .* riscv64$",
    ):
        CodeTests("evaluation.verifier")


@pytest.mark.skipif(os.geteuid() != 0, reason="every test here runs as another user than root")
@pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="needs a Python that any user can start")
def test_limits_hold_for_another_user_than_root() -> None:
    script = """import threading, os
from alignment_core.evaluation.sandbox import check_limits, passes_tests
check_limits(threading.Event())
assert passes_tests("def f(): return 1", "assert f() == 1", threading.Event())
print(os.geteuid())"""
    python = "/usr/bin/python3"  # ours, and this tree, may lie where root alone can look
    who: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(Path(alignment_core.__file__).parent, f"{place}/alignment_core")
        os.chmod(place, 0o755)
        ran = subprocess.run([python, "-c", script], env={"PYTHONPATH": place}, capture_output=True, text=True, **who)
    assert ran.stdout == "65534\n", ran.stderr


def test_code_is_the_last_fenced_block_or_everything() -> None:
    assert code_of("a = 1") == "a = 1"
    assert code_of("```python\na\n```\n```\nb\n```") == "a\n"
    assert code_of("```py\na\n```\nand\n```Python\nb\n```") == "b\n"


def test_all_inputs_of_a_program_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "SECONDS", 3.0)
    label = json.dumps({"inputs": ["1"] * 20, "outputs": ["1"] * 20})
    (_, score), *_ = CodeTests("evaluation.verifier")([("import time; time.sleep(1); print(input())", label)])
    assert score == 0.0, "each alone would pass"
