"""The wheel, installed outside any checkout: a single public name, and the first commands of a new user."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from alignment.flows.shipped_recipes import FOLDER
from tests.deployments.installed import FEW_STEPS, Environment, installed, wheel
from tests.deployments.up import ROOT

__all__ = ["installed", "wheel"]
OURS = ("alignment", "alignment_core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_wheel_has_the_public_packages_and_recipes_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(OURS)
    recipes = {name.removeprefix("alignment/recipes/") for name in names if name.startswith("alignment/recipes/")}
    assert recipes == {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")}
    assert {"alignment/prefect.yaml", "alignment/py.typed", "alignment_core/py.typed"} <= set(names)
    packed = {name for name in names if name.startswith("alignment/") and name.endswith(".py")}
    ours = {f"alignment/{path.relative_to(ROOT)}" for top in ("flows", "tasks") for path in (ROOT / top).rglob("*.py")}
    assert packed == ours | {"alignment/__init__.py"}


def test_the_installed_package_is_imported_and_shadows_no_other_names(installed: Environment) -> None:
    (installed.folder / "work" / "flows").mkdir(parents=True, exist_ok=True)
    (installed.folder / "work" / "flows" / "__init__.py").write_text("MINE = True\n")
    code = (
        "import alignment, alignment_core, importlib.util, sys; sys.path.insert(0, '.'); import flows; assert flows.MINE\n"
        "print(alignment.__file__, alignment_core.__file__, importlib.util.find_spec('tasks'), alignment.sft.__name__)"
    )
    where = installed.run("-c", code).split()
    assert str(ROOT) not in " ".join(where)
    assert where[0].startswith(str(installed.folder))
    assert where[2:] == ["None", "sft"]


def test_an_installed_recipe_runs_by_name(installed: Environment) -> None:
    outcome = installed.align("run", "quickstart", *(word for override in FEW_STEPS for word in ("--set", override)))
    assert outcome["status"] == "completed"
    assert installed.align("check", "sweep")["status"] == "checked"
    printed = installed.run("align", "fields", "sft")
    assert "sft" in printed
