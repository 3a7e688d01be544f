"""Verifiers: a user's function, by name, and errors of missing functions and invalid results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.errors import DataError, UserError
from alignment_core.rewards.verify import FIELD, verifier_content, verify
from alignment_core.user_code.functions import load_function

SOURCE = """
import functools

def exact(prompt, completion, label):
    return completion == label

def half(prompt, completion, label):
    return 0.5

def fails(prompt, completion, label):
    return 1 / 0

def nan(prompt, completion, label):
    return float("nan")

def high(prompt, completion, label):
    return 1.5

def words(prompt, completion, label):
    return "good"

CONSTANT = 3
PARTIAL = functools.partial(half, "")
"""


@pytest.fixture
def name(tmp_path: Path) -> Callable[[str], str]:
    """``name("exact")`` is the recipe's name of that function of the file above."""
    path = tmp_path / "checks.py"
    path.write_text(SOURCE)
    return lambda function: f"{path}:{function}"


def row(completion: str = "ab", label: str | None = "ab", task: str | None = None) -> dict:
    return {
        "source": "prompts.jsonl",
        "task": task,
        "prompt_text": "reverse: ba\n",
        "completion_text": completion,
        "label": label,
    }


def test_the_built_in_verifier_asks_the_rows_own_task():
    assert verify("task", [row(" ab ", task="reverse")]) == [1.0]
    assert verify("task", [row("ba", task="reverse")]) == [0.0]


def test_the_built_in_verifier_cannot_score_a_row_without_a_task():
    with pytest.raises(DataError, match=r"prompts\.jsonl: not a built-in task, so `verifier: task` cannot score it"):
        verify("task", [row()])


def test_the_built_in_verifier_cannot_score_a_row_without_a_label():
    with pytest.raises(DataError, match=r"prompts\.jsonl: the verifier task failed: .*without a label"):
        verify("task", [row(label=None, task="reverse")])


def test_a_function_of_a_file(name):
    assert verify(name("exact"), [row("ab")]) == [1.0]
    assert verify(name("exact"), [row("xy")]) == [0.0]
    assert verify(name("half"), [row()]) == [0.5]


def test_a_function_of_a_module(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert name("exact")
    assert verify("checks:exact", [row("ab")]) == [1.0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("fails", r"failed: ZeroDivisionError: division by zero \(checks\.py, line \d+\)"),
        ("words", "failed: ValueError: could not convert string to float: 'good'"),
        ("nan", r"returned nan; a number in \[0, 1\] is needed"),
        ("high", r"returned 1\.5; a number in \[0, 1\] is needed"),
    ],
)
def test_a_bad_answer_names_the_row_and_the_verifier(name, function, says):
    with pytest.raises(
        DataError, match=rf"^prompts\.jsonl: the verifier .*checks\.py:{function} {says}, for the prompt 'reverse: ba"
    ):
        verify(name(function), [row()])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            "accuracy",
            "'accuracy' is neither `code` nor `math` nor `reasoning_gym` nor `task` nor `module:function` nor",
        ),
        (":function", "is neither"),
        ("nowhere.py:f", "cannot be loaded: FileNotFoundError: no file nowhere.py"),
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError"),
        (".relative:f", "cannot be loaded: ModuleNotFoundError"),
        ("textwrap:dednet", "textwrap has no 'dednet'; did you mean 'dedent'"),
        ("textwrap:no_such", "textwrap has no 'no_such'; it has "),
        ("math:pi", "has no Python source; name a function written in Python"),
        ("string:digits", "is not a function"),
    ],
)
def test_a_missing_verifier_is_an_error_of_the_user(given, says):
    uses: list[Any] = [lambda given: verify(given, [row()])]
    uses += [] if given == "accuracy" else [lambda given: load_function(given, FIELD)]
    uses += [] if given == "string:digits" else [verifier_content]  # which executes nothing
    for use in uses:
        with pytest.raises(UserError, match=r"^evaluation\.verifier: .*" + says) as caught:
            use(given)
        assert not isinstance(caught.value, DataError)


@pytest.mark.parametrize("content", ["def broken(:", "raise RuntimeError('no licence')"])
def test_a_file_that_cannot_be_imported_is_an_error_of_the_user(tmp_path, content):
    (tmp_path / "broken.py").write_text(content)
    with pytest.raises(UserError, match=r"cannot be loaded: (SyntaxError|RuntimeError: no licence)"):
        load_function(f"{tmp_path / 'broken.py'}:f", FIELD)


def test_the_digest_of_a_verifier_is_of_its_source_and_not_of_its_path(name, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "renamed.py").write_text(SOURCE)
    assert verifier_content(name("exact")) == verifier_content(f"{tmp_path}/other/renamed.py:exact")
    assert verifier_content(name("exact"))["name"] == "exact"
    assert verifier_content(name("half")) != verifier_content(name("exact"))
    assert verifier_content("task") == {"name": "task"}


def test_scores_of_programs_belong_to_the_python_that_ran_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from itertools import batched` fails before Python 3.12: a stage of another version is another one."""
    contents = []
    for version in ((3, 11, 7), (3, 11, 9), (3, 12, 0)):
        monkeypatch.setattr(sys, "version_info", version)
        contents.append(verifier_content("code"))
    assert contents[0] == contents[1] != contents[2]


def test_callables_have_the_digest_of_their_python_file_and_are_refused_without_source(name):
    with pytest.raises(UserError, match="has no Python source"):
        verifier_content("math:sqrt")
    assert verifier_content(name("PARTIAL"))["code"] == verifier_content(name("half"))["code"]
