"""The user's Python: what counts of it, what a process loads, and what is refused."""

from __future__ import annotations

import os
import py_compile
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.environments.environments import ACT, environment_content
from alignment_core.errors import UserError
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.user_code.definitions import definition
from alignment_core.user_code.dependencies import code_of, counting
from alignment_core.user_code.functions import function_content
from alignment_core.user_code.process import FunctionProcess

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
    assert {one for one in sys.modules if one.partition(".")[0] in ("helper", "deeper", "package", "bare")} <= modules


def test_two_files_may_import_different_modules_of_the_same_name(write: Write) -> None:
    source = "from helper import VALUE\ndef f(x): return x * VALUE\n"
    for folder, value in (("one", 2), ("two", 3)):
        write(f"{folder}/helper.py", f"VALUE = {value}\n")
    assert [ask(f"{write(f'{folder}/reward.py', source)}:f", 1) for folder in ("one", "two")] == [2.0, 3.0]


def test_a_file_never_takes_the_name_of_its_neighbour(write: Write) -> None:
    name = write("math2.py", "from verifier_math2 import VALUE\ndef f(x): return x * VALUE\n") + ":f"
    write("verifier_math2.py", "VALUE = 2\n")
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
    name = write("reward.py", IMPORTS[0]) + ":f"
    write("helper.py", "VALUE = 2\n")
    with counting() as files:
        function_content(name, FIELD)
        files |= {f"/{number:0100}.py": "0" * 64 for number in range(1000)}
        assert ask(name, 1) == 2.0


def test_an_import_that_the_source_does_not_show_is_refused_with_a_sentence(write: Write) -> None:
    write("package/__init__.py", "")
    write("package/hidden.py", "VALUE = 2\n")
    hidden = (
        "import package\nfrom importlib import import_module\ndef f(x): return import_module(f'package.{x}').VALUE\n"
    )
    said = str(ask(write("reward.py", hidden) + ":f", "hidden"))
    assert "hidden.py is loaded in a way that the source does not show" in said
    assert "write `import` and the module's name" in said


def test_a_process_loads_only_counted_files(write: Write) -> None:
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


MARK = """
import os
from pathlib import Path
with Path(__file__).with_suffix(".ran").open("a") as file:
    file.write(f"{os.getpid()} ")
"""
"""Says which processes execute a file."""


def test_a_key_executes_nothing_of_the_users(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


RAN = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\nVALUE = 2\n"
"""A module that leaves a trace when it is executed."""
UNSEEN = {
    "a name made when it is called": "import importlib\ndef f(x): return importlib.import_module(f'unseen_{x}').VALUE\n",
    "a folder put on the path": "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'more'))\n"
    "def f(x):\n    import below_7\n    return below_7.VALUE\n",
    "a path": "import importlib.util, sys\nfrom pathlib import Path\n"
    "def f(x):\n    spec = importlib.util.spec_from_file_location('any', Path(__file__).with_name('unseen_7.py'))\n"
    "    sys.modules['any'] = module = importlib.util.module_from_spec(spec)\n"
    "    spec.loader.exec_module(module)\n    return module.VALUE\n",
    "its text": "from pathlib import Path\ndef f(x):\n    path = Path(__file__).with_name('unseen_7.py')\n    names = {}\n"
    "    exec(compile('import math\\n' + path.read_text(), path, 'exec'), names)\n    return names['VALUE']\n",
    "bytecode": "import importlib\ndef f(x): return importlib.import_module(f'compiled_{x}').VALUE\n",
}


@pytest.mark.parametrize("source", UNSEEN.values(), ids=UNSEEN.keys())
@pytest.mark.parametrize("by_name", [True, False])
def test_an_uncounted_module_of_the_user_is_refused_by_name(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, by_name: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = write("mine_8.py", source)
    unseen = [write(name, RAN) for name in ("unseen_7.py", "more/below_7.py")]
    unseen.append(py_compile.compile(write("compiled_7.py", RAN), str(tmp_path / "compiled_7.pyc"), doraise=True) or "")
    (tmp_path / "compiled_7.py").unlink()
    name = "mine_8:f" if by_name else f"{path}:f"
    process = FunctionProcess(name, 20.0, FIELD)
    with process:
        said = [str(answer) for _, answer in process.answers([[7], [7]])]
    assert all(any(one in each for one in unseen) for each in said), said
    assert all("import" in each for each in said)
    assert list(tmp_path.rglob("*.ran")) == [], "refused before it is executed"


BY_PATH = """
import importlib.util
import sys

def f(path):
    spec = importlib.util.spec_from_file_location(f"by_path_{len(sys.modules)}", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.VALUE
"""


ELSEWHERE = {
    "a link": ("import_module(f'linked_{x}').VALUE", "project/linked_7.py"),
    "a linked folder": ("import_module(f'folder_{x}.unseen_7').VALUE", "project/folder_7/unseen_7.py"),
    "a folder put on the path of a package": (
        "(known_7.__path__.append(beside('../elsewhere')), import_module(f'known_7.unseen_{x}'))[1].VALUE",
        "elsewhere/unseen_7.py",
    ),
    "bytecode from elsewhere": ("import_module(f'hidden_{x}').VALUE", "project/hidden_7.pyc"),
    "a link by its path": ("loaded(beside('linked_7.py')).VALUE", "project/linked_7.py"),
    "a file of a linked folder by its path": (
        "loaded(beside('folder_7/unseen_7.py')).VALUE",
        "project/folder_7/unseen_7.py",
    ),
    "a script that is a link": ("runpy.run_path(beside('linked_7.py'))['VALUE']", "project/linked_7.py"),
    "the text of a link": (
        "(exec(compile(open(beside('linked_7.py')).read(), beside('linked_7.py'), 'exec'), names := {}), names)[1]['VALUE']",
        "project/linked_7.py",
    ),
    "a link as a script by its name": ("runpy.run_module(f'linked_{x}')['VALUE']", "project/linked_7.py"),
    "bytecode from elsewhere by its path": ("loaded(beside('hidden_7.pyc')).VALUE", "project/hidden_7.pyc"),
    "bytecode from elsewhere as a script": (
        "runpy.run_path(beside('hidden_7.pyc'))['VALUE']",
        "project/hidden_7.pyc",
    ),
    "a linked archive put on the path": (
        "(sys.path.append(beside('linked_7.zip')), import_module(f'zipped_{x}'))[1].VALUE",
        "project/linked_7.zip",
    ),
    "a linked archive by its path": (
        "exec(zipimport.zipimporter(beside('linked_7.zip')).get_code('zipped_7'))",
        "project/linked_7.zip",
    ),
    "an editable install": (
        "(sys.meta_path.append(Editable), import_module(f'editable_{x}'))[1].VALUE",
        "elsewhere/unseen_7.py",
    ),
}
"""How files are reached that are not below the folder of the function's file, and the file that the refusal names."""
LOADS = """
import importlib.util, os, runpy, sys, zipimport
from importlib import import_module
from pathlib import Path
import known_7

def beside(name): return os.path.abspath(Path(__file__).parent / name)

def loaded(path):
    spec = importlib.util.spec_from_file_location("any", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

class Editable:
    def find_spec(name, path=None, target=None):
        if name == "editable_7":
            return importlib.util.spec_from_file_location(name, Path(beside("../elsewhere/unseen_7.py")).resolve())

def f(x): return """


@pytest.mark.parametrize(("load", "named"), ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_an_uncounted_file_that_lies_elsewhere_is_refused(write: Write, tmp_path: Path, load: str, named: str) -> None:
    unseen = write("elsewhere/unseen_7.py", RAN)
    write("project/known_7/__init__.py", "")
    (tmp_path / "project/linked_7.py").symlink_to("../elsewhere/unseen_7.py")
    (tmp_path / "project/folder_7").symlink_to("../elsewhere")
    py_compile.compile(unseen, str(tmp_path / "project/hidden_7.pyc"), dfile="/gone/hidden_7.py", doraise=True)
    with zipfile.ZipFile(tmp_path / "elsewhere/zipped_7.zip", "w") as archive:
        archive.writestr("zipped_7.py", "VALUE = 2\n")
    (tmp_path / "project/linked_7.zip").symlink_to("../elsewhere/zipped_7.zip")
    said = str(ask(f"{write('project/reward.py', LOADS + load)}:f", 7))
    assert f"{tmp_path / named} is loaded in a way that the source does not show" in said
    assert "write `import` and the module's name" in said
    assert list(tmp_path.rglob("*.ran")) == [], "refused before it is executed"


OPTIONAL = """
from importlib import import_module
from importlib.util import find_spec
import hidden_7, linked_7

def f(name): return bool(find_spec(name)) + linked_7.VALUE + hidden_7.VALUE
"""


def test_links_and_bytecode_that_the_source_shows_may_be_imported_and_others_looked_for(
    write: Write, tmp_path: Path
) -> None:
    unseen = write("elsewhere/unseen_7.py", "VALUE = 2\n")
    write("project/optional_7.py", RAN)
    (tmp_path / "project/linked_7.py").symlink_to(unseen)
    py_compile.compile(unseen, str(tmp_path / "project/hidden_7.pyc"), dfile="/gone/hidden_7.py", doraise=True)
    name = write("project/reward.py", OPTIONAL) + ":f"
    with counting() as files:
        function_content(name, FIELD)
        assert {Path(file).name for file in files} == {"reward.py", "unseen_7.py", "hidden_7.pyc"}
        assert ask(name, "optional_7") == 5.0


def test_bytecode_without_source_may_be_loaded_if_it_is_installed(write: Write, tmp_path: Path) -> None:
    source = write("elsewhere/unseen_7.py", "VALUE = 2\n")
    theirs = tmp_path / "lib/site-packages/library_7.pyc"
    py_compile.compile(source, str(theirs), dfile="/gone/library_7.py", doraise=True)
    lines = "import sys\ndef g(path):\n    sys.path.append(path.rpartition('/')[0])\n"
    lines += "    return __import__('library' + '_7').VALUE + f(path)\n"
    assert ask(write("reward.py", BY_PATH + lines) + ":g", str(theirs)) == 4.0


def test_our_own_functions_may_load_plug_ins_that_are_not_installed(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("plug_in_7.py", "VALUE = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ask("alignment_core.plugins:resolve", "plug_in_7:VALUE") == 2.0


def test_files_of_tools_below_the_users_folder_may_be_loaded_by_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, folder in (("TORCHINDUCTOR_CACHE_DIR", "compiled"), ("TMPDIR", "scratch")):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / folder))
    write("venv/pyvenv.cfg", "home = /usr/bin\n")
    write("conda/conda-meta/history", "")
    theirs: tuple[str, ...] = (
        ".triton/cache/AB/kernel.py",
        "compiled/ab/kernel.py",
        "scratch/torchinductor_me/ab/kernel.py",
    )
    theirs += ("venv/src/library.py", "conda/opt/library.py", "node_modules/gyp/input.py")
    theirs += ("venv/lib/python3.11/site-packages/library.py",)
    with FunctionProcess(write("reward.py", BY_PATH) + ":f", 20.0, FIELD) as process:
        assert [one for _, one in process.answers([[write(path, "VALUE = 2\n")] for path in theirs])] == [2.0] * 7
        mine = write("rules/mine.py", "VALUE = 2\n")
        assert f"{mine} is loaded in a way that the source does not show" in str(
            [one for _, one in process.answers([[mine]])]
        )
    for folder in (".rules", "scratch"):  # below it, where the function's file is, too
        mine = write(f"{folder}/mine.py", "VALUE = 2\n")
        said = str(ask(write(f"{folder}/reward.py", BY_PATH) + ":f", mine))
        assert f"{mine} is loaded in a way that the source does not show" in said


def test_files_of_tools_in_the_folder_for_temporary_files_may_be_loaded_from_a_file_there(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert ask(write("reward.py", BY_PATH) + ":f", write("torchinductor_me/ab/kernel.py", "VALUE = 2\n")) == 2.0


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


def test_installed_and_downloaded_modules_may_be_imported_in_any_way(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write("hf/modules/metric_7.py", "VALUE = 2\n")
    write("target/vendored_7.py", "VALUE = 3\n")
    write("target/vendored_7-1.0.dist-info/METADATA", "Name: vendored_7\n")
    monkeypatch.syspath_prepend(tmp_path / "target")
    lines = "import importlib, sys\nfrom pathlib import Path\nimport vendored_7\n"
    lines += "sys.path.append(str(Path(__file__).parent / 'hf' / 'modules'))\n"
    lines += (
        "def f(x): return importlib.import_module(x).VALUE * vendored_7.VALUE + bool(importlib.import_module('wave'))\n"
    )
    name = write("reward.py", lines) + ":f"
    with counting() as files:
        function_content(name, FIELD)
        assert list(files) == [name[:-2]]
        assert ask(name, "metric_7") == 7.0


def test_two_files_of_one_process_with_different_modules_of_the_same_name_are_refused(write: Write) -> None:
    tools = []
    for folder in ("one", "two"):
        write(f"{folder}/helper.py", "VALUE = 1\n")
        tools.append(write(f"{folder}/{folder}.py", f"from helper import VALUE\ndef {folder}(): return VALUE\n"))
    config = {"tools": [f"{tool}:{Path(tool).stem}" for tool in tools], "verifier": "math"}
    process = FunctionProcess(ACT, 20.0, FIELD)
    with process:
        said = str(
            next(process.answers([["reset", "0", "alignment_core.environments.tools:Tools", None, config, "", ""]]))[1]
        )
    assert "imports " in said
    assert "two/helper.py where another file of this stage imports" in said


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
def test_where_a_function_is_defined_is_read_from_the_source(write: Write, source: str, file: str) -> None:
    path = write("mine.py", source + "\n")
    write("helper.py", "def g(x): ...\n")
    found = definition(code_of(path), "f")
    assert found
    assert found.name == file


def test_a_function_whose_name_is_nowhere_in_the_source_is_refused_before_anything_is_executed(write: Write) -> None:
    with pytest.raises(UserError, match="has no 'f'; it has score"):
        function_content(write("mine.py", "raise RuntimeError\ndef score(fs): ...\n") + ":f", FIELD)


def test_a_missing_function_whose_name_is_in_the_source_is_refused_when_the_file_is_loaded(write: Write) -> None:
    with pytest.raises(UserError, match="has no 'f'; it has A"):
        ask(write("mine.py", "class A:\n    def f(self): ...\n") + ":f", 1)


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
