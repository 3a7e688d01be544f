"""The recipes that are deployed, of the project and of installed distributions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


OF_METHODS = {
    *("sft", "continued-pretraining", "reward-model", "process-reward-model", "dpo", "kto", "iterative-dpo"),
    *("rejection-sampling", "conditional-sft", "distillation", "grpo", "ppo", "reinforce-baseline", "nightly"),
}


def test_every_method_that_trains_has_a_recipe_for_one_gpu_and_for_a_node():
    large = shipped_recipes.for_large_models()
    assert large.keys() == {f"{size}/{name}" for size in ("gpu", "node") for name in OF_METHODS}
    assert shipped_recipes.shipped().keys() >= OF_METHODS, "each has a small one of the same name"
    assert not large.keys() & {one.name for one in shipped_recipes.shipped().values()}, "and only that is deployed"


@pytest.mark.parametrize("name", sorted(shipped_recipes.for_large_models()))
def test_recipes_for_large_models_start_from_a_hub_model_and_say_where_numbers_are_from(name: str):
    recipe_file = shipped_recipes.for_large_models()[name]
    recipe: Any = recipe_file.recipe()
    assert recipe.model.scratch is None
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", recipe.model.name)
    rates = re.findall(r"^.*learning_rate: .*$", recipe_file.path.read_text(), re.MULTILINE)
    assert rates
    assert [line for line in rates if "#" not in line] == []
    assert recipe.resources.gradient_checkpointing
    assert f"{'One GPU' if name.startswith('gpu/') else 'Eight GPUs'} of 80 GB" in recipe_file.description


def test_recipes_for_large_models_are_named_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_recipes.file_of(Path("gpu/dpo")) == (ROOT / "deployments/recipes/gpu/dpo.yaml").resolve()
    with pytest.raises(
        UserError, match="neither a recipe file nor a recipe that is installed; did you mean 'node/dpo'"
    ):
        shipped_recipes.file_of(Path("node/dpoo"))
    assert shipped_recipes.file_of(Path("mine/dpo")) == Path("mine/dpo"), "a path"
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "dpo").write_text(RECIPE)
    assert shipped_recipes.file_of(Path("gpu/dpo")) == Path("gpu/dpo"), "a user's own file goes first"
