"""A function by its name: the file that defines it, one that is not there, and how it is called."""

from __future__ import annotations

import re

import pytest

from alignment_core.errors import UserError
from alignment_core.user_code.definitions import definition
from alignment_core.user_code.dependencies import code_of
from alignment_core.user_code.functions import function_content
from alignment_core.user_code.process import FunctionProcess
from tests.user_code.calls import FIELD, Write, ask

DEFINED = {
    "def f(x): ...": "mine.py",
    "try:\n    from helper import g as f\nexcept ImportError:\n    def f(x): ...": "mine.py",
    "from helper import g as f": "helper.py",
    "import helper\nf = helper.g": "helper.py",
    "from helper import g\nf = g": "helper.py",
    "from textwrap import dedent as f": "textwrap.py",
    "import textwrap as t\nf = t.dedent": "textwrap.py",
    "import functools\nfrom helper import g\nf = functools.partial(g)": "mine.py",
    "with open(__file__) as f: ...": "mine.py",
    "f = len": "mine.py",
    "def make():\n    global f\n    def f(x): ...\nmake()": "mine.py",
    "class A:\n    global f\n    def f(x): ...": "mine.py",
    "import sys\nsys.modules[__name__].f = print": "mine.py",
    "from sys import modules\nmodules[__name__].f = print": "mine.py",
    "globals()['f'] = print": "mine.py",
    "import mine\nmine.f = print": "mine.py",
    "exec('def f(x): ...')": "mine.py",
    "def __getattr__(name): ...": "mine.py",
    "from helper import *": "mine.py",
    "from helper import keep\n@keep('f')\ndef g(x): ...": "mine.py",
    "def g(x, y=(f := print)): ...": "mine.py",
    "match print:\n    case f: ...": "mine.py",
    "if True:\n    def f(x): ...\nelse:\n    from helper import g as f": "helper.py",
}


@pytest.mark.parametrize(("source", "file"), DEFINED.items())
def test_the_place_of_a_functions_definition_is_read_from_the_source(write: Write, source: str, file: str) -> None:
    path = write("mine.py", source + "\n")
    write("helper.py", "def g(x): ...\n")
    path_of_definition = definition(code_of(path), "f")
    assert path_of_definition
    assert path_of_definition.name == file


def test_a_function_whose_name_is_nowhere_in_the_source_is_refused_before_anything_is_executed(write: Write) -> None:
    with pytest.raises(UserError, match="has no 'f'; it has score"):
        function_content(write("mine.py", "raise RuntimeError\ndef score(fs): ...\n") + ":f", FIELD)


def test_a_missing_function_whose_name_is_in_the_source_is_refused_when_the_file_is_loaded(write: Write) -> None:
    with pytest.raises(UserError, match="has no 'f'; it has A"):
        ask(write("mine.py", "class A:\n    def f(self): ...\n") + ":f", 1)


def test_a_data_class_of_a_file_finds_its_module(write: Write) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    source += "@dataclass\nclass A:\n    x: float\ndef f(x): return A(x).x\n"
    assert ask(write("reward.py", source) + ":f", 2) == 2.0


HOW = {
    "function": r"a reward function is called with one list of completions, each a dict \(docs/recipes/rewards\.md\)",
    "verifier": r"a verifier is called with `prompt`, `completion` and `label` \(docs/recipes/rewards\.md\)",
}
SIGNATURES = """
def none(): return 1.0

async def many(prompts, completions, *, answers): return 1.0

def inside(*given): return none(*given) if given[0] else object()
"""
SAYS_HOW = [("none", "function", True), ("many", "verifier", True), ("inside", "function", False)]


@pytest.mark.parametrize(("function", "kind", "says"), SAYS_HOW)
def test_an_error_about_wrong_parameters_explains_how_the_function_is_called(
    write: Write, function: str, kind: str, says: bool
) -> None:
    calls: list[list[object]] = [["a", "b", None]] if kind == "verifier" else [[[{"prompt": "a"}]], [[]]]
    with FunctionProcess(f"{write('reward.py', SIGNATURES)}:{function}", 20.0, f"rl.rewards.0.{kind}") as process:
        for _, answer in process.answers(calls):
            assert str(answer).startswith("failed: TypeError: ")
            assert bool(re.search(rf"; {HOW[kind]}$", str(answer))) == says, answer


FORMS = """
async def ours(rows): return [float(len(row["completion"])) for row in rows]
async def trl(completions, prompts, **columns): return await ours([{"completion": text} for text in completions])
async def openrlhf(queries, prompts, labels): return {"rewards": [float(len(query)) - 1 for query in queries]}
"""


@pytest.mark.parametrize("form", ["ours", "trl", "openrlhf"])
def test_a_coroutine_function_of_any_library_works_on_many_calls_at_once(write: Write, form: str) -> None:
    rows = [{"prompt": "a", "completion": "bb", "label": None, "messages": None}]
    with FunctionProcess(f"{write('reward.py', FORMS)}:{form}", 20.0, FIELD) as process:
        ((_, answer),) = process.answers([[rows]])
        assert process.is_concurrent
    rewards = answer["rewards"] if isinstance(answer, dict) else answer
    assert rewards == [2.0]
