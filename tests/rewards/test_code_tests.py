"""Programs of completions, executed: passing and failing ones."""

from __future__ import annotations

import json
import platform
import threading
from pathlib import Path

import psutil
import pytest

from alignment_core.errors import DataError, EnvironmentFault, Stopped
from alignment_core.rewards.sandbox import process as sandboxed
from alignment_core.rewards.verifiers import code as code_tests
from alignment_core.rewards.verifiers.code import CodeTests, code_of
from alignment_core.rewards.verify import verify
from tests.rewards.programs import ADDS, DOUBLES, row


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
def test_a_program_that_exits_early_or_patches_functions_of_the_tests_fails(trick: str) -> None:
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


@pytest.mark.parametrize("label", [None, "4", "{}", '{"tests": ""}', '{"inputs": ["1"], "outputs": []}'])
def test_a_label_without_tests_is_a_failure_and_not_a_wrong_answer(label: str | None) -> None:
    with pytest.raises(DataError, match=r"^p\.jsonl:1: the verifier code failed: the label is not `\{\"tests\": "):
        verify("code", [row("def double(x): return 2 * x", label)])


def test_closing_ends_the_programs_that_run() -> None:
    tests = CodeTests("evaluation.verifier")
    threading.Timer(0.5, tests.close).start()
    with pytest.raises(Stopped):
        list(tests([row("import time; time.sleep(600)")] * 3))
    started = psutil.Process().children(recursive=True)
    # a process of another test may not be reaped yet
    alive = [process for process in started if process.status() != psutil.STATUS_ZOMBIE]
    assert not [process for process in alive if sandboxed.__file__ in process.cmdline()]


def test_an_unsupported_machine_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        EnvironmentFault,
        match=r"^evaluation\.verifier: `code` needs 64-bit Linux on x86_64 or aarch64, but this .* riscv64$",
    ):
        CodeTests("evaluation.verifier")


def test_programs_are_refused_without_the_required_kernel_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "sandboxed.py"
    other.write_text(Path(sandboxed.__file__).read_text().replace("= 444,", "= 9999,"))  # no such system call
    monkeypatch.setattr(sandboxed, "__file__", str(other))
    with pytest.raises(
        EnvironmentFault, match=r"^evaluation\.verifier: `code` a program cannot be run .*: Landlock: Function"
    ):
        CodeTests("evaluation.verifier")


def test_code_is_the_last_fenced_block_or_the_whole_text() -> None:
    assert code_of("a = 1") == "a = 1"
    assert code_of("```python\na\n```\n```\nb\n```") == "a\n"
    assert code_of("```py\na\n```\nand\n```Python\nb\n```") == "b\n"


def test_all_inputs_of_a_program_share_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "SECONDS", 3.0)
    label = json.dumps({"inputs": ["1"] * 20, "outputs": ["1"] * 20})
    (_, score), *_ = CodeTests("evaluation.verifier")([row("import time; time.sleep(1); print(input())", label)])
    assert score == 0.0, "each alone would pass"
