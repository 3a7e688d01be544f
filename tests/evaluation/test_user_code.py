"""The user's Python: what counts of it, what a process loads, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.errors import UserError
from alignment_core.evaluation.function_process import FunctionProcess
from alignment_core.evaluation.user_code import counting
from alignment_core.evaluation.verifiers import function_content, load_function

FIELD = "rl.rewards.0.function"
Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(name: str, source: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return str(path)

    return put


def ask(name: str, *arguments: object) -> object:
    process = FunctionProcess(name, 20.0, FIELD)
    try:
        return next(answer for _, answer in list(process.answers([list(arguments)])))
    finally:
        process.close()


IMPORTS = [
    "from helper import VALUE\ndef f(x): return x * VALUE\n",
    "import helper\ndef f(x): return x * helper.VALUE\n",
    "def f(x):\n    from helper import VALUE\n    return x * VALUE\n",
    "import importlib\ndef f(x): return x * importlib.import_module('helper').VALUE\n",
    "from package.inner import VALUE\ndef f(x): return x * VALUE\n",
    "import package\ndef f(x): return x * package.inner.VALUE\n",
    "from bare.inner import VALUE\ndef f(x): return x * VALUE\n",
]


@pytest.mark.parametrize("source", IMPORTS)
def test_what_a_file_imports_from_beside_it_is_found_and_counts(write: Write, source: str) -> None:
    name = write("reward.py", source) + ":f"
    write("helper.py", "from deeper import VALUE\n")
    write("package/__init__.py", "from . import inner\n")
    for folder in ("package", "bare"):
        write(f"{folder}/inner.py", "from deeper import VALUE\n")
    write("deeper.py", "VALUE = 2\n")
    write("unused.py", "VALUE = 2\n")
    before, modules = function_content(name, FIELD), set(sys.modules)
    assert ask(name, 3) == 6.0
    write("unused.py", "VALUE = 3\n")
    assert function_content(name, FIELD) == before
    write("deeper.py", "VALUE = 3  # as many characters, within the same second\n")
    assert function_content(name, FIELD) != before
    assert ask(name, 3) == 9.0
    assert {one for one in sys.modules if one.partition(".")[0] in ("helper", "deeper", "package", "bare")} <= modules


def test_two_files_may_import_different_modules_of_one_name(write: Write) -> None:
    source = "from helper import VALUE\ndef f(x): return x * VALUE\n"
    for folder, value in (("one", 2), ("two", 3)):
        write(f"{folder}/helper.py", f"VALUE = {value}\n")
    functions = [load_function(f"{write(f'{folder}/reward.py', source)}:f") for folder in ("one", "two")]
    assert [function(1) for function in functions] == [2, 3]


def test_a_file_never_takes_the_name_of_its_neighbour(write: Write) -> None:
    name = write("math2.py", "from verifier_math2 import VALUE\ndef f(x): return x * VALUE\n") + ":f"
    write("verifier_math2.py", "VALUE = 2\n")
    assert load_function(name)(3) == 6
    assert ask(name, 3) == 6.0


def test_where_the_files_lie_does_not_count(write: Write) -> None:
    contents = []
    for folder, name in (("here", "reward.py"), ("there", "renamed.py")):
        write(f"{folder}/helper.py", "VALUE = 2\n")
        contents.append(function_content(write(f"{folder}/{name}", IMPORTS[0]) + ":f", FIELD))
    assert contents[0] == contents[1]


def test_our_own_modules_that_a_file_imports_count(write: Write) -> None:
    plain, ours = (
        function_content(write("reward.py", f"{line}\ndef f(x): return x\n") + ":f", FIELD)
        for line in ("import math", "from alignment_core.data import tasks")
    )
    assert plain != ours


def test_a_module_of_a_package_counts_with_what_it_imports_of_it(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("user_project_7/__init__.py", "")
    write("user_project_7/rewards.py", "from .values import VALUE\ndef f(x): return x * VALUE\n")
    monkeypatch.syspath_prepend(Path(write("user_project_7/values.py", "VALUE = 2\n")).parents[1])
    name = "user_project_7.rewards:f"
    before = function_content(name, FIELD)
    assert ask(name, 1) == 2.0
    write("user_project_7/values.py", "VALUE = 3\n")
    assert function_content(name, FIELD) != before
    assert ask(name, 1) == 3.0


@pytest.mark.parametrize("package", [True, False])
def test_what_a_file_imports_from_its_folder_by_the_name_of_the_package_counts(
    write: Write, monkeypatch: pytest.MonkeyPatch, package: bool
) -> None:
    top = f"user_rewards_{package}"
    name = write(f"{top}/main.py", f"from {top}.common import VALUE\ndef f(x): return x * VALUE\n") + ":f"
    if package:
        write(f"{top}/__init__.py", "")
    monkeypatch.syspath_prepend(Path(write(f"{top}/common.py", "VALUE = 2\n")).parents[1])
    before = function_content(name, FIELD)
    assert ask(name, 1) == 2.0
    write(f"{top}/common.py", "VALUE = 3\n")
    assert function_content(name, FIELD) != before
    assert ask(name, 1) == 3.0


def test_a_folder_that_is_called_as_a_package_of_another_place_is_not_taken_for_it(write: Write) -> None:
    write("json/decoder.py", "JSONDecoder = None\n")
    name = write("json/main.py", "from json.decoder import JSONDecoder\ndef f(x): return JSONDecoder().decode(x)\n")
    assert ask(f"{name}:f", "2") == 2.0


def test_any_number_of_files_may_count(write: Write) -> None:
    name = write("reward.py", IMPORTS[0]) + ":f"
    write("helper.py", "VALUE = 2\n")
    with counting() as files:
        files |= {f"/{number:0100}.py": "0" * 64 for number in range(1000)}
        assert ask(name, 1) == 2.0


def test_an_import_that_cannot_be_seen_in_the_source_is_refused_with_a_sentence(write: Write) -> None:
    write("package/__init__.py", "")
    write("package/hidden.py", "VALUE = 2\n")
    hidden = (
        "import package\nfrom importlib import import_module\ndef f(x): return import_module(f'package.{x}').VALUE\n"
    )
    said = str(ask(write("reward.py", hidden) + ":f", "hidden"))
    assert "hidden.py is imported in a way that cannot be seen in the source; write `import package.hidden`" in said


def test_a_process_loads_what_was_counted_and_nothing_else(write: Write) -> None:
    name = write("reward.py", IMPORTS[0]) + ":f"
    helper = write("helper.py", "VALUE = 2\n")
    with counting() as files:
        function_content(name, FIELD)
        assert set(files) == {str(Path(path).resolve()) for path in (name[:-2], helper)}
        write("helper.py", "# a comment\nVALUE = 2\n")
        assert ask(name, 1) == 2.0
        write("helper.py", "VALUE = 3\n")
        with pytest.raises(UserError, match=r"helper\.py changed since this stage began"):
            ask(name, 1)
    assert ask(name, 1) == 3.0, "where no key counts it, it may be anything"


def test_a_data_class_of_a_file_knows_its_module(write: Write) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    source += "@dataclass\nclass A:\n    x: float\ndef f(x): return A(x).x\n"
    assert ask(write("reward.py", source) + ":f", 2) == 2.0


def test_a_key_is_computed_again_without_executing_the_file(write: Write, tmp_path: Path) -> None:
    source = (
        "from pathlib import Path\nwith Path(__file__).with_name('count').open('a') as file:\n    file.write('x')\n"
    )
    name = write("reward.py", f"{source}\ndef f(x): return x\n") + ":f"
    before = [function_content(name, FIELD) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    assert (tmp_path / "count").read_text() == "x"
    write("reward.py", f"{source}\ndef f(x): return x + 1\n")
    assert function_content(name, FIELD) != before[0]
    assert (tmp_path / "count").read_text() == "xx"
