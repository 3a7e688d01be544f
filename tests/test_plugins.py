"""Plug-ins: modules of a folder of ours and entry points of installed distributions, found by one mechanism."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment_core import public, recipes
from alignment_core.errors import UserError
from alignment_core.plugins import Group
from alignment_core.recipes import parse_recipe, reference
from alignment_core.recipes.choice import OneOf
from alignment_core.recipes.methods import decides, loaded, method
from tests.distributions import distribution, forget, site_packages
from tests.recipes.contents import METHODS

GROUP = Group("alignment.things", "our_things", "THING", "thing")
METHOD = """
from typing import Literal
from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.methods import Method
class MineRecipe(BaseRecipe):
    "Mine."
    method: Literal["mine"] = "mine"
METHOD = Method(MineRecipe, compose=lambda recipe: None, decides={"mine/.*": "mine"})
"""
Install = Callable[..., None]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Install]:
    """``install(name, offers, files)``: later lookups include the distribution."""
    site = tmp_path / "site"
    distribution(site, "ours", {}, {"our_things/__init__.py": "", "our_things/old_hat.py": "THING = 'felt'"})

    def installed(name: str, offers: dict[str, dict[str, str]], files: dict[str, str] | None = None) -> None:
        distribution(site, name, offers, files)
        forget()

    with site_packages(site):
        yield installed


def things(**places: str) -> dict[str, dict[str, str]]:
    return {GROUP.name: places}


def test_plugins_of_a_distribution_are_added_after_built_in_ones(install):
    install("theirs", things(cap="their_things:CAP"), {"their_things.py": "CAP = 'wool'"})
    assert GROUP.targets() == {"old-hat": "our_things.old_hat:THING", "cap": "their_things:CAP"}
    assert (GROUP.load("old-hat"), GROUP.load("old_hat"), GROUP.load("cap")) == ("felt", "felt", "wool")
    assert GROUP.module("cap") == "their_things"


def test_an_entry_point_without_an_attribute_has_that_of_its_group(install):
    install("theirs", things(cap="their_caps"), {"their_caps.py": "THING = 'wool'"})
    assert GROUP.load("cap") == "wool"


def test_plugins_are_imported_only_when_loaded(install):
    install("broken", things(cap="no_such_module"), {})
    assert GROUP.names() == ("old-hat", "cap")
    with pytest.raises(
        UserError, match=r"the thing 'cap' \(no_such_module:THING, group alignment.things\) does not load"
    ):
        GROUP.load("cap")
    assert GROUP.load("old-hat") == "felt"


def test_an_unknown_name_gets_the_list_and_the_nearest(install):
    with pytest.raises(UserError, match="there is no thing 'oldhat'; choose one of old-hat; did you mean 'old-hat'"):
        GROUP.load("oldhat")


def test_two_plugins_of_the_same_name_are_refused_only_when_loaded(install):
    install("one", things(cap="one_caps"), {"one_caps.py": "THING = 1"})
    install("two", things(cap="two_caps"), {"two_caps.py": "THING = 2"})
    with pytest.raises(UserError, match="provide the thing 'cap': one_caps:THING, two_caps:THING; uninstall"):
        GROUP.load("cap")
    assert GROUP.load("old-hat") == "felt"


def test_a_distribution_found_twice_counts_once(install, tmp_path, monkeypatch):
    offers, files = things(cap="their_things:CAP"), {"their_things.py": "CAP = 'wool'"}
    monkeypatch.syspath_prepend(str(distribution(tmp_path / "again", "theirs", offers, files)))
    install("theirs", offers, files)
    assert GROUP.load("cap") == "wool"


def test_broken_plug_ins_are_left_out_of_a_choice_and_named_if_the_choice_fails(install):
    code = "from types import SimpleNamespace\nTHING = SimpleNamespace(config=type('Wool', (), {'KEY': 'wool'}))"
    install("theirs", things(cap="their_caps"), {"their_caps.py": code})
    install("broken", things(beret="no_such_module"))
    choice = OneOf(Group(GROUP.name, "no_folder_of_ours", "THING", "thing"), "a hat")
    assert choice.kinds.keys() == {"wool"}
    with pytest.raises(
        ValueError, match=r"a hat needs exactly one of `wool`; this has none; the thing 'beret' .* does not"
    ):
        choice.validate({"silk": 1})


def test_an_object_of_another_type_does_not_load(install):
    install("theirs", things(cap="their_caps"), {"their_caps.py": "THING = 3"})
    texts = Group(GROUP.name, "our_things", "THING", "thing", "builtins:str")
    problem = "the thing 'cap' (their_caps:THING, group alignment.things) does not load: TypeError: it is not a str"
    assert texts.loaded() == ({"old-hat": "felt"}, [problem])
    with pytest.raises(UserError, match="it is not a str"):
        texts.load("cap")


def test_a_built_in_is_not_replaced_by_a_plugin_of_the_same_name(install):
    install("theirs", things(old_hat="their_hats"), {"their_hats.py": "THING = 'wool'"})
    plugins, (problem,) = GROUP.loaded()
    assert plugins == {"old-hat": "felt"}
    assert "provide the thing 'old-hat': our_things.old_hat:THING, their_hats:THING; uninstall" in problem


def test_a_plugin_that_does_not_load_is_tried_once(install, tmp_path):
    tried = tmp_path / "tried"
    install("broken", things(cap="broken_caps"), {"broken_caps.py": f"open({str(tried)!r}, 'a').write('x'); 1 / 0"})
    assert GROUP.loaded() == GROUP.loaded()
    assert tried.read_text() == "x"


WRONG = {
    "reward": "class REWARD: pass",
    "config": "from alignment_core.rewards.base import RewardKind\nREWARD = RewardKind(dict, None, None)",
    "verifier": "from alignment_core.rewards.kinds.function import REWARD",
    "kind": "KIND = 3",
    "origin": """
from alignment_core.data.origins import Origin
class Nameless(Origin):
    def name(self, pinned): ...
    def content(self, pinned): ...
    def read(self, pinned, seed, kind): ...
ORIGIN = Nameless()
""",
    "broken_origin": "print('tried'); raise AttributeError('not today')",
    "method": "from alignment_core.recipes.methods import Method\nMETHOD = Method(dict, compose=dict)",
}


def test_broken_plug_ins_of_every_kind_break_no_built_in(tmp_path):
    offers = {
        "alignment.rewards": {"wrong": "wrong.reward", "config": "wrong.config", "verifier": "wrong.verifier"},
        "alignment.kinds": {"wrong": "wrong.kind"},
        "alignment.origins": {"wrong": "wrong.origin", "broken": "wrong.broken_origin"},
        "alignment.methods": {"wrong": "wrong.method"},
    }
    site = distribution(tmp_path, "wrong", offers, {f"wrong/{name}.py": code for name, code in WRONG.items()})
    code = """
from pathlib import Path
from alignment_core.recipes import load_recipe
load_recipe(Path("deployments/recipes/grpo.yaml"))
from alignment_core.data import kinds, origins
from alignment_core.recipes.methods import METHODS
from alignment_core.recipes.row_plugins import formats
from alignment_core.recipes.sections.rewards import CHOICE, REWARDS
for group in REWARDS, kinds.KINDS, origins.ORIGINS, METHODS:
    print(*group.loaded()[1], sep="\\n")
assert formats() and "verifier" in CHOICE.kinds
"""
    paths = os.pathsep.join([str(ROOT), str(site)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for problem in (
        "it is not a RewardKind",
        "dict is not a RewardConfig",
        "provide the kind of reward 'verifier'",
        "it is not a Kind",
        "every Origin needs `description`",
        "AttributeError: not today",
        "dict is not a BaseRecipe",
    ):
        assert done.stdout.count(problem) == 1, (problem, done.stdout)
    assert done.stdout.count("tried") == 1


def test_an_attribute_error_in_a_recipe_module_is_an_import_error_with_its_cause(monkeypatch):
    def broken(name: str) -> None:
        raise AttributeError("no `description`")

    monkeypatch.delitem(vars(recipes), "BaseRecipe", raising=False)
    monkeypatch.setattr(public.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"recipes\.recipe does not load: AttributeError: no `description`"):
        from alignment_core.recipes import BaseRecipe  # noqa: F401


# ---------------------------------------------------------------- methods


def test_a_method_of_a_distribution_has_its_recipes_fields_and_words(install):
    install("mine", {"alignment.methods": {"mine": "mine"}}, {"mine.py": METHOD})
    recipe = parse_recipe({"method": "mine", "name": "one", "model": "some/model"})
    assert type(recipe).__name__ == "MineRecipe"
    assert "## method: mine\n\nMine." in reference.markdown()
    assert decides("mine/data", "data.rows") == "mine.rows"


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_library", "does not load: ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('not today')", "does not load: RuntimeError: not today"),
        ("METHOD = 3", "is not a Method"),
        (METHOD.replace("mine", "other"), "is called 'other' by its recipe"),
    ],
)
def test_a_broken_method_is_reported_on_use_and_the_others_load(install, code, why):
    install("mine", {"alignment.methods": {"mine": "broken_method"}}, {"broken_method.py": code})
    with pytest.raises(UserError, match=why) as caught:
        parse_recipe({"method": "mine"})
    assert "the method 'mine' (broken_method:METHOD" in str(caught.value)
    assert method("sft").name == "sft"
    methods, problems = loaded()
    assert [recipe_method.name for recipe_method in methods] == METHODS
    assert problems == [str(caught.value)]
    assert reference.at("sft.training")[1]


def test_a_recipe_of_an_uninstalled_method_is_refused_with_the_methods_name():
    with pytest.raises(
        UserError, match=r"the run r1: method: is 'zzz'.*; a plug-in that provides it must be installed"
    ):
        parse_recipe({"method": "zzz", "name": "one", "model": "m"}, origin="the run r1")
