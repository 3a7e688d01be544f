"""The recipes that are deployed, of the project and of installed distributions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from alignment.flows import shipped_recipes
from alignment_core.errors import UserError
from tests.distributions import distribution, site_packages

ROOT = Path(__file__).parents[2]
RECIPE = "# What it is\n# for.\nmethod: sft\nname: one\nmodel: some/model\nsft: {data: rows.jsonl}\n"


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """The folder of recipes of an installed distribution."""
    offers = {"alignment.recipes": {"theirs": "their_package.recipes", "gone": "no_such_package.recipes"}}
    files = {"their_package/__init__.py": "", "their_package/recipes/their-own.yaml": RECIPE}
    with site_packages(distribution(tmp_path, "their-dist", offers, files)):
        yield tmp_path / "their_package" / "recipes"


def test_prefect_yaml_is_up_to_date_with_the_shipped_recipes():
    written = (ROOT / "prefect.yaml").read_text()
    assert written == shipped_recipes.prefect_yaml(), "align deployments alignment --prefect-yaml > prefect.yaml"
    deployed = yaml.safe_load(written)["deployments"]
    assert {deployment["name"] for deployment in deployed} == {
        path.stem for path in (ROOT / "deployments/recipes").glob("*.yaml")
    }
    assert [deployment["name"] for deployment in deployed if "schedules" in deployment] == ["nightly"]


def test_recipes_of_a_distribution_are_deployed_beside_built_in_ones(theirs):
    recipes = shipped_recipes.shipped()
    assert {"quickstart", "their-own"} <= recipes.keys()
    own = recipes["their-own"]
    assert (own.distribution, own.function, own.description) == ("their-dist", "deployed_their_own", "What it is for.")
    assert own.recipe().sft.data.sources[0].path == f"{theirs}/rows.jsonl"  # type: ignore[attr-defined]
    assert [
        deployment["name"] for deployment in yaml.safe_load(shipped_recipes.prefect_yaml("their-dist"))["deployments"]
    ] == ["their-own"]
    assert "their-own" not in shipped_recipes.prefect_yaml()


def test_a_plugin_recipe_does_not_replace_a_shipped_recipe_of_its_name(theirs):
    (theirs / "sft.yaml").write_text(RECIPE)
    assert shipped_recipes.shipped()["sft"].distribution == "alignment"
    assert shipped_recipes.hidden() == {
        str(theirs / "sft.yaml"): "their-dist brings a recipe 'sft', and so does alignment"
    }


def test_a_distribution_without_recipes_is_refused():
    with pytest.raises(UserError, match="no distribution 'their-dist' that ships recipes is installed"):
        shipped_recipes.shipped("their-dist")
