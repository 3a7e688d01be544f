"""Which files of the user a key counts, and that a process loads these."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from alignment_core.environments.environments import environment_content
from alignment_core.errors import UserError
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.user_code.dependencies import counting
from alignment_core.user_code.functions import function_content
from tests.user_code.calls import FIELD, SCALES, Write, ask

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
def test_imports_beside_a_file_are_found_and_count(write: Write, source: str) -> None:
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
    assert {
        module for module in sys.modules if module.partition(".")[0] in ("helper", "deeper", "package", "bare")
    } <= modules


def test_two_files_may_import_different_modules_of_the_same_name(write: Write) -> None:
    source = "from helper import VALUE\ndef f(x): return x * VALUE\n"
    for folder, value in (("one", 2), ("two", 3)):
        write(f"{folder}/helper.py", f"VALUE = {value}\n")
    assert [ask(f"{write(f'{folder}/reward.py', source)}:f", 1) for folder in ("one", "two")] == [2.0, 3.0]


def test_a_file_never_takes_the_name_of_its_neighbour(write: Write) -> None:
    name = write("math2.py", "from verifier_math2 import VALUE\ndef f(x): return x * VALUE\n") + ":f"
    write("verifier_math2.py", "VALUE = 2\n")
    assert ask(name, 3) == 6.0


def test_the_place_of_files_does_not_count(write: Write) -> None:
    contents = []
    for folder, name in (("here", "reward.py"), ("there", "renamed.py")):
        write(f"{folder}/helper.py", "VALUE = 2\n")
        contents.append(function_content(write(f"{folder}/{name}", SCALES) + ":f", FIELD))
    assert contents[0] == contents[1]


def test_our_own_modules_that_a_file_imports_count(write: Write) -> None:
    plain, ours = (
        function_content(write("reward.py", f"{line}\ndef f(x): return x\n") + ":f", FIELD)
        for line in ("import math", "from alignment_core.data import tasks")
    )
    assert plain != ours


def test_a_module_of_a_package_counts_with_its_imports_from_the_package(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_imports_from_the_own_folder_by_the_name_of_the_package_count(
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


def test_a_folder_with_the_name_of_an_installed_package_does_not_replace_the_package(write: Write) -> None:
    write("json/decoder.py", "JSONDecoder = None\n")
    name = write("json/main.py", "from json.decoder import JSONDecoder\ndef f(x): return JSONDecoder().decode(x)\n")
    assert ask(f"{name}:f", "2") == 2.0


def test_any_number_of_files_may_count(write: Write) -> None:
    name = write("reward.py", SCALES) + ":f"
    write("helper.py", "VALUE = 2\n")
    with counting() as files:
        function_content(name, FIELD)
        files |= {f"/{number:0100}.py": "0" * 64 for number in range(1000)}
        assert ask(name, 1) == 2.0


def test_a_process_loads_only_counted_files(write: Write) -> None:
    name = write("reward.py", SCALES) + ":f"
    helper = write("helper.py", "VALUE = 2\n")
    with counting() as files:
        function_content(name, FIELD)
        assert set(files) == {str(Path(path).resolve()) for path in (name[:-2], helper)}
        write("helper.py", "# a comment\nVALUE = 2\n")
        assert ask(name, 1) == 2.0
        write("helper.py", "VALUE = 3\n")
        with pytest.raises(UserError, match=r"helper\.py changed since this stage began"):
            ask(name, 1)
    assert ask(name, 1) == 3.0, "outside keys, it may be anything"


MARK = """
import os
from pathlib import Path
with Path(__file__).with_suffix(".ran").open("a") as file:
    file.write(f"{os.getpid()} ")
"""
"""Says which processes execute a file."""


def test_a_key_executes_no_code_of_the_user(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write("marked_7/__init__.py", MARK)
    write("marked_7/inner/__init__.py", MARK)
    write("marked_7/inner/rules.py", f"{MARK}from marked_7.base import f\nclass World: ...\n")
    write("marked_7/base.py", f"{MARK}def f(x): return x\n")
    before = function_content("marked_7.inner.rules:f", FIELD)
    file = str(tmp_path / "marked_7" / "inner" / "rules.py")
    for place in ("marked_7.inner.rules", file):
        function_content(f"{place}:f", FIELD)
        environment_content(EnvironmentConfig(name=f"{place}:World"))
        with pytest.raises(UserError, match="has no 'g'; it has os, Path"):
            function_content(f"{place}:g", FIELD)
    ran = {process for mark in tmp_path.rglob("*.ran") for process in mark.read_text().split()}
    assert str(os.getpid()) not in ran
    assert len(ran) == 2, "to ask each environment of the two for a `content`"
    assert not any(name.startswith("marked_7") for name in sys.modules)
    write("marked_7/inner/__init__.py", "")
    assert function_content("marked_7.inner.rules:f", FIELD) != before


ROOTS = [
    ("reward.py", "from shared_7.values import VALUE\ndef f(x): return x * VALUE\n"),
    ("mine_7/rewards.py", "from shared_7.values import VALUE\ndef f(x): return x * VALUE\n"),
    ("mine_7/rewards.py", "from mine_7.inner import VALUE\ndef f(x): return x * VALUE\n"),
]


@pytest.mark.parametrize(("file", "source"), ROOTS)
@pytest.mark.parametrize("by_name", [True, False])
def test_files_that_are_not_installed_count_anywhere_on_the_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, source: str, by_name: bool
) -> None:
    for folder in ("project", "others"):
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(tmp_path / folder)
    write("project/mine_7/__init__.py", "")
    write("project/mine_7/inner.py", "from shared_7 import values\nVALUE = values.VALUE\n")
    path = write(f"project/{file}", source)
    values = write("others/shared_7/values.py", "VALUE = 2\n")
    name = f"{file.removesuffix('.py').replace('/', '.')}:f" if by_name else f"{path}:f"
    with counting() as files:
        before = function_content(name, FIELD)
        assert values in files
        assert ask(name, 3) == 6.0
    Path(values).write_text("VALUE = 3\n")
    assert function_content(name, FIELD) != before
    assert ask(name, 3) == 9.0


def test_a_module_of_an_archive_that_imports_find_may_be_imported(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "vendored.egg", "w") as archive:
        archive.writestr("zipped_7.py", "VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path / "vendored.egg")
    name = write("reward.py", "from zipped_7 import VALUE\ndef f(x): return x * VALUE\n") + ":f"
    with counting():
        before = function_content(name, FIELD)
        assert ask(name, 3) == 6.0
    with zipfile.ZipFile(tmp_path / "vendored.egg", "w") as archive:
        archive.writestr("zipped_7.py", "VALUE = 3\n")
    assert function_content(name, FIELD) != before


def test_a_key_is_computed_again_without_executing_the_file_of_an_environment(write: Write, tmp_path: Path) -> None:
    source = (
        "from pathlib import Path\nwith Path(__file__).with_name('count').open('a') as file:\n    file.write('x')\n"
    )
    name = write("reward.py", f"{source}\ndef f(x): return x\n") + ":f"
    config = EnvironmentConfig(name=name)
    before = [environment_content(config) for _ in range(3)]
    assert before[0] == before[1] == before[2]
    assert (tmp_path / "count").read_text() == "x"
    write("reward.py", f"{source}\ndef f(x): return x + 1\n")
    assert environment_content(config) != before[0]
    assert (tmp_path / "count").read_text() == "xx"
