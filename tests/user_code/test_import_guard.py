"""Loading of files that a key does not count: refused by name, unless they belong to a library or a tool."""

from __future__ import annotations

import py_compile
import zipfile
from pathlib import Path

import pytest

from alignment_core.environments.environments import ACT
from alignment_core.user_code.dependencies import counting
from alignment_core.user_code.functions import function_content
from alignment_core.user_code.process import FunctionProcess
from tests.user_code.calls import FIELD, Write, ask


def test_an_import_that_the_source_does_not_show_is_refused_with_a_sentence(write: Write) -> None:
    write("package/__init__.py", "")
    write("package/hidden.py", "VALUE = 2\n")
    hidden = (
        "import package\nfrom importlib import import_module\ndef f(x): return import_module(f'package.{x}').VALUE\n"
    )
    refusal = str(ask(write("reward.py", hidden) + ":f", "hidden"))
    assert "hidden.py is loaded in a way that the source does not show" in refusal
    assert "write `import` and the module's name" in refusal


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
        refusals = [str(answer) for _, answer in process.answers([[7], [7]])]
    assert all(any(file in each for file in unseen) for each in refusals), refusals
    assert all("import" in each for each in refusals)
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
    refusal = str(ask(f"{write('project/reward.py', LOADS + load)}:f", 7))
    assert f"{tmp_path / named} is loaded in a way that the source does not show" in refusal
    assert "write `import` and the module's name" in refusal
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


def test_installed_bytecode_without_source_may_be_loaded(write: Write, tmp_path: Path) -> None:
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
        assert [answer for _, answer in process.answers([[write(path, "VALUE = 2\n")] for path in theirs])] == [2.0] * 7
        mine = write("rules/mine.py", "VALUE = 2\n")
        assert f"{mine} is loaded in a way that the source does not show" in str(
            [answer for _, answer in process.answers([[mine]])]
        )
    for folder in (".rules", "scratch"):  # below it, where the function's file is, too
        mine = write(f"{folder}/mine.py", "VALUE = 2\n")
        refusal = str(ask(write(f"{folder}/reward.py", BY_PATH) + ":f", mine))
        assert f"{mine} is loaded in a way that the source does not show" in refusal


def test_files_of_tools_in_the_folder_for_temporary_files_may_be_loaded_from_a_file_there(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert ask(write("reward.py", BY_PATH) + ":f", write("torchinductor_me/ab/kernel.py", "VALUE = 2\n")) == 2.0


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
        refusal = str(
            next(process.answers([["reset", "0", "alignment_core.environments.tools:Tools", None, config, "", ""]]))[1]
        )
    assert "imports " in refusal
    assert "two/helper.py where another file of this stage imports" in refusal
