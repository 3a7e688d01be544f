"""A path in a recipe begins at the recipe's own file, one that is typed at the working folder; names stay names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.artifacts import open_store
from alignment_core.data.pin import pin
from alignment_core.errors import UserError
from alignment_core.evaluation.verifiers import load_function
from alignment_core.recipes import BaseRecipe, RlRecipe, load_recipe, parse_recipe
from alignment_core.stages.base_model import pin_model
from flows.any_recipe import run_any
from flows.planning import plan

RECIPE = {
    "method": "sft",
    "name": "one",
    "model": "base",
    "sft": {"data": ["rows.jsonl", "org/rows"]},
    "evaluation": {"prompts": "held/out.jsonl", "verifier": "judge.py:score"},
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    for folder in ("recipes/base", "recipes/held", "elsewhere/held"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")

    def loaded(*overrides: str, **fields: Any) -> Any:
        path = tmp_path / "recipes" / "one.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, **fields}))
        return load_recipe(Path("../recipes/one.yaml"), overrides)

    return loaded


def test_paths_begin_at_the_recipes_file_wherever_the_command_is_given(load, tmp_path):
    recipe, home = load(), tmp_path / "recipes"
    assert [source.path for source in recipe.sft.data.sources] == [f"{home}/rows.jsonl", "org/rows"]
    assert recipe.model.name == f"{home}/base"
    assert recipe.evaluation.prompts.sources[0].path == f"{home}/held/out.jsonl"
    assert recipe.evaluation.verifier == f"{home}/judge.py:score"


def test_what_is_typed_begins_at_the_working_folder(load, tmp_path):
    recipe = load("sft.data=[mine.jsonl]", "evaluation.verifier=other.py:score", "model=./model")
    here = tmp_path / "elsewhere"
    assert recipe.sft.data.sources[0].path == f"{here}/mine.jsonl"
    assert recipe.evaluation.verifier == f"{here}/other.py:score"
    assert recipe.model.name == f"{here}/model"


@pytest.mark.parametrize(
    "name", ["policy/production", "Qwen/Qwen2.5-0.5B-Instruct", "model@sha256:" + "1" * 12, "1234abcd"]
)
def test_names_of_models_stay_names(load, name):
    assert load(model=name).model.name == name


@pytest.mark.parametrize("path", ["store:preferences/", "/data/rows.jsonl", "Anthropic/hh-rlhf"])
def test_what_is_no_relative_path_stays(load, path):
    assert load(sft={"data": path}).sft.data.sources[0].path == path


def test_functions_of_modules_stay_and_globs_begin_at_the_file(load, tmp_path):
    recipe = load(evaluation={"prompts": "inbox/**/*.jsonl", "verifier": "package.module:score"})
    assert recipe.evaluation.verifier == "package.module:score"
    assert recipe.evaluation.prompts.sources[0].path == f"{tmp_path}/recipes/inbox/**/*.jsonl"


def test_the_error_of_a_missing_file_says_where_it_looked(load, tmp_path):
    for path in ("rows.jsonl", "held/rowz"):
        (source,) = load(sft={"data": path}).sft.data.sources
        with pytest.raises(
            UserError, match=f"^{tmp_path}/recipes/{path}: no such file or folder .*at the recipe's file"
        ):
            pin(source)
    with pytest.raises(UserError, match=f"^model: {tmp_path}/gone: no such folder .*at the recipe's file"):
        pin_model(load(model="../gone").model)
    with pytest.raises(UserError, match=f"no file {tmp_path}/recipes/judge.py .*at the recipe's file"):
        load_function(load().evaluation.verifier)


def test_what_is_only_in_the_working_folder_is_refused_and_named(load, tmp_path):
    here = tmp_path / "elsewhere"
    (here / "rows.jsonl").touch()
    (here / "mine").mkdir()
    (here / "judge.py").touch()
    with pytest.raises(UserError) as caught:
        load(model="mine")
    said = str(caught.value)
    assert f"sft.data.sources.0.path: there is no {tmp_path}/recipes/rows.jsonl" in said
    assert f"but {here}/rows.jsonl in the working folder: write ../elsewhere/rows.jsonl" in said
    assert "write ../elsewhere/judge.py" in said
    assert f"model.name: there is no {tmp_path}/recipes/mine" in said
    assert "if mine is meant as a name" in said
    assert load("sft.data=rows.jsonl", "evaluation.verifier=judge.py:f", "model=mine").model.name == f"{here}/mine"


def test_a_home_is_expanded_and_folders_to_write_to_begin_at_the_file_too(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = load(store="../store", tracking={"tensorboard": "curves"}, sft={"data": "~/rows.jsonl"})
    assert recipe.sft.data.sources[0].path == f"{tmp_path}/home/rows.jsonl"
    assert recipe.store == f"{tmp_path}/store"
    assert recipe.tracking.tensorboard == f"{tmp_path}/recipes/curves"
    assert load("store=mine").store == f"{tmp_path}/elsewhere/mine"
    assert load(store="file:///data/store").store == "file:///data/store"
    assert load(tracking={"tensorboard": True}).tracking.tensorboard is True


def test_functions_of_rl_begin_at_the_file_and_options_of_others_stay(load, tmp_path):
    tools = {
        "name": "alignment_core.rollout.tools:Tools",
        "options": {"tools": ["t.py:f", "m:g"], "verifier": "v.py:h"},
    }
    section = {"prompts": "p.jsonl", "rewards": [{"environment": True}, {"function": "r.py:f"}, {"verifier": "v.py:f"}]}
    home = tmp_path / "recipes"

    def rl(environment: dict[str, Any]) -> RlRecipe:
        found = load(method="rl", sft=None, evaluation=None, rl={**section, "environment": environment})
        assert isinstance(found, RlRecipe)
        return found

    recipe = rl(tools)
    assert recipe.rl.environment is not None
    assert recipe.rl.environment.options == {"tools": [f"{home}/t.py:f", "m:g"], "verifier": f"{home}/v.py:h"}
    assert [one.function or one.verifier for one in recipe.rl.rewards[1:]] == [f"{home}/r.py:f", f"{home}/v.py:f"]
    own = rl({"name": "world.py:World", "options": {"map": "t.py:f"}}).rl.environment
    assert own is not None
    assert (own.name, own.options) == (f"{home}/world.py:World", {"map": "t.py:f"})


def test_a_recipe_that_is_kept_means_the_same_from_any_folder(load, tmp_path, monkeypatch):
    recipe = load()
    monkeypatch.chdir("/")
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe


def test_paths_in_the_overrides_of_a_deployed_run_begin_at_the_deployments_folder(load, tmp_path, monkeypatch):
    ran: list[BaseRecipe] = []
    monkeypatch.setattr("flows.any_recipe.run_recipe", lambda recipe, *_: ran.append(recipe))
    run_any(load(), ["sft.data=other.jsonl"], None)  # a worker starts it in that folder
    assert ran[0].sft.data.sources[0].path == f"{tmp_path}/elsewhere/other.jsonl"  # type: ignore[attr-defined]
    assert ran[0].evaluation.verifier == f"{tmp_path}/recipes/judge.py:score"  # type: ignore[union-attr]


def test_a_recipe_that_is_piped_in_begins_at_the_working_folder(load, tmp_path):
    read, write = os.pipe()
    os.write(write, yaml.safe_dump({**RECIPE, "model": "some/model"}).encode())
    os.close(write)
    recipe = load_recipe(Path(f"/dev/fd/{read}"))
    os.close(read)
    assert recipe.evaluation.verifier == f"{tmp_path}/elsewhere/judge.py:score"  # type: ignore[union-attr]


def test_the_same_recipe_and_files_in_two_folders_have_the_same_keys(tmp_path):
    contents = []
    for name in ("a", "b"):
        folder = tmp_path / name
        (folder / "held").mkdir(parents=True)
        (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
        (folder / "held/out.jsonl").write_text('{"prompt": "1+2=", "label": "3"}\n')
        (folder / "judge.py").write_text("def score(prompt, completion, label):\n    return 1.0\n")
        fields = {"model": {"scratch": {}}, "sft": {"data": "rows.jsonl"}}
        (folder / "one.yaml").write_text(yaml.safe_dump({**RECIPE, **fields}))
        planned = plan(load_recipe(folder / "one.yaml"), open_store(tmp_path / "store"))
        contents.append({stage.label: stage.config.content() for stage in planned.stages})
    assert contents[0] == contents[1]
