"""A path in a recipe begins at the recipe's own file, one that is typed at the working folder; names stay names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from alignment.flows import deployment_flows, deployments
from alignment.flows.planning import plan
from alignment.flows.recipe_flow import run_any
from alignment.flows.shipped_recipes import FOLDER, shipped
from alignment_core.artifacts import open_store
from alignment_core.data.pin import pin
from alignment_core.errors import UserError
from alignment_core.home import align_home
from alignment_core.methods.nightly import NightlyRecipe
from alignment_core.methods.rl import RlRecipe
from alignment_core.nights.inbox import read_inbox
from alignment_core.recipes import BaseRecipe, DataSource, folder_of, load_recipe, parse_recipe
from alignment_core.stages.base_model import pin_model
from alignment_core.user_code.functions import load_function

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


def test_paths_of_the_command_line_are_relative_to_the_working_folder(load, tmp_path):
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
def test_values_that_are_no_relative_paths_are_unchanged(load, path):
    assert load(sft={"data": path}).sft.data.sources[0].path == path


def test_functions_of_modules_stay_and_globs_begin_at_the_file(load, tmp_path):
    recipe = load(evaluation={"prompts": "inbox/**/*.jsonl", "verifier": "package.module:score"})
    assert recipe.evaluation.verifier == "package.module:score"
    assert recipe.evaluation.prompts.sources[0].path == f"{tmp_path}/recipes/inbox/**/*.jsonl"


def test_the_error_of_a_missing_file_names_the_path_and_its_base(load, tmp_path):
    for path in ("rows.jsonl", "held/rowz"):
        (source,) = load(sft={"data": path}).sft.data.sources
        with pytest.raises(
            UserError, match=f"^{tmp_path}/recipes/{path}: no such file or folder .*to the recipe's file"
        ):
            pin(source)
    with pytest.raises(UserError, match=f"^model: {tmp_path}/recipes/../gone: no such folder .*to the recipe's file"):
        pin_model(load(model="../gone").model)
    with pytest.raises(UserError, match=f"no file {tmp_path}/recipes/judge.py .*to the recipe's file"):
        load_function(load().evaluation.verifier, "evaluation.verifier")


def test_files_that_exist_only_in_the_working_folder_are_refused_by_name(load, tmp_path):
    here = tmp_path / "elsewhere"
    (here / "rows.jsonl").touch()
    (here / "mine").mkdir()
    (here / "judge.py").touch()
    with pytest.raises(UserError) as caught:
        load(model="mine")
    message = str(caught.value)
    assert f"sft.data.sources.0.path: there is no {tmp_path}/recipes/rows.jsonl" in message
    assert f"but {here}/rows.jsonl exists in the working folder: write ../elsewhere/rows.jsonl" in message
    assert "write ../elsewhere/judge.py" in message
    assert f"model.name: there is no {tmp_path}/recipes/mine" in message
    assert "if mine is meant as a name" in message
    assert load("sft.data=rows.jsonl", "evaluation.verifier=judge.py:f", "model=mine").model.name == f"{here}/mine"


def test_a_home_is_expanded_and_folders_to_write_to_begin_at_the_file_too(load, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    recipe = load(store="../store", tracking={"tensorboard": "curves"}, sft={"data": "~/rows.jsonl"})
    assert recipe.sft.data.sources[0].path == f"{tmp_path}/home/rows.jsonl"
    assert recipe.store == f"{tmp_path}/recipes/../store"
    assert recipe.tracking.tensorboard == f"{tmp_path}/recipes/curves"
    assert load("store=mine").store == f"{tmp_path}/elsewhere/mine"
    assert load(store="file:///data/store").store == "file:///data/store"
    assert load(tracking={"tensorboard": True}).tracking.tensorboard is True


def test_functions_of_rl_are_relative_to_the_recipe_and_other_options_are_unchanged(load, tmp_path):
    tools = {
        "name": "alignment_core.environments.tools:Tools",
        "options": {"tools": ["t.py:f", "m:g"], "verifier": "v.py:h"},
    }
    section = {"prompts": "p.jsonl", "rewards": [{"environment": True}, {"function": "r.py:f"}, {"verifier": "v.py:f"}]}
    home = tmp_path / "recipes"

    def rl(environment: dict[str, Any]) -> RlRecipe:
        recipe = load(method="rl", sft=None, evaluation=None, rl={**section, "environment": environment})
        assert isinstance(recipe, RlRecipe)
        return recipe

    recipe = rl(tools)
    assert recipe.rl.environment is not None
    assert recipe.rl.environment.options == {"tools": [f"{home}/t.py:f", "m:g"], "verifier": f"{home}/v.py:h"}
    rewards: Any = recipe.rl.rewards
    assert [rewards[1].function, rewards[2].verifier] == [f"{home}/r.py:f", f"{home}/v.py:f"]
    own = rl({"name": "world.py:World", "options": {"map": "t.py:f"}}).rl.environment
    assert own is not None
    assert (own.name, own.options) == (f"{home}/world.py:World", {"map": "t.py:f"})


def test_a_stored_recipe_has_the_same_paths_from_any_folder(load, tmp_path, monkeypatch):
    recipe = load()
    monkeypatch.chdir("/")
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe


def test_paths_in_the_overrides_of_a_deployed_run_begin_at_the_deployments_folder(load, tmp_path, monkeypatch):
    ran: list[BaseRecipe] = []
    monkeypatch.setattr("alignment.flows.recipe_flow.run_recipe", lambda recipe, *_: ran.append(recipe))
    run_any(load(), ["sft.data=other.jsonl"], None)  # a worker starts it in that folder
    assert ran[0].sft.data.sources[0].path == f"{tmp_path}/elsewhere/other.jsonl"  # type: ignore[attr-defined]
    assert ran[0].evaluation.verifier == f"{tmp_path}/recipes/judge.py:score"  # type: ignore[union-attr]


def test_paths_of_a_piped_recipe_are_relative_to_the_working_folder(load, tmp_path):
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


def test_dots_after_a_symbolic_link_resolve_as_in_the_file_system(load, tmp_path):
    (tmp_path / "else/where").mkdir(parents=True)
    (tmp_path / "recipes/link").symlink_to(tmp_path / "else/where")
    (tmp_path / "else/rows.jsonl").write_text("right")
    (tmp_path / "recipes/rows.jsonl").write_text("wrong")
    (source,) = load(sft={"data": "link/../rows.jsonl"}).sft.data.sources
    assert Path(source.path).read_text() == "right"


def nightly(folder: Path, data: Any) -> Path:
    content = {
        "method": "nightly",
        "name": "night",
        "model": "some/model",
        "dpo": {"data": data},
        "evaluation": {"prompts": "org/rows"},
        "promotion": {"tag": "policy/p", "gates": [{"metric": "kl", "max": 1}]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "night.yaml").write_text(yaml.safe_dump(content))
    return folder / "night.yaml"


def inbox_of(recipe: Path) -> tuple[DataSource, ...]:
    """Where a nightly recipe takes its rows from."""
    loaded = load_recipe(recipe)
    assert isinstance(loaded, NightlyRecipe)
    return loaded.dpo.data.sources


def test_a_glob_beside_a_recipe_matches_in_a_folder_of_any_name(tmp_path):
    store = open_store(tmp_path / "store")
    folder = tmp_path / "a[1]*?"
    (folder / "inbox/new").mkdir(parents=True)
    (folder / "inbox/new/1.jsonl").write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    for data in ("inbox/**/*.jsonl", "inbox/n[ea]w/*.jsonl"):
        inbox = read_inbox(inbox_of(nightly(folder, data)), set(), store)
        assert [row.where for row in inbox.rows] == ["new/1.jsonl:1"]
    with pytest.raises(UserError, match="there is no such file or folder"):  # not a glob that matches nothing
        read_inbox(inbox_of(nightly(folder, "gone.jsonl")), set(), store)


@pytest.mark.parametrize("data", ["inbox", ["inbox"], {"path": "inbox"}, {"sources": ["inbox"]}])
def test_an_inbox_that_is_not_there_yet_is_a_path_and_no_name(tmp_path, data):
    (source,) = inbox_of(nightly(tmp_path, data))
    assert source.path == f"{tmp_path}/inbox"


def test_a_recipe_is_piped_only_if_its_path_is_no_regular_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Path("/dev/shm", f"{os.getpid()}.yaml")
    recipe.touch()
    try:
        assert folder_of(recipe) == Path("/dev/shm")
        with recipe.open() as file:  # as with `align run /dev/stdin < recipe.yaml`
            for place in ("/dev/fd", "/proc/self/fd"):
                assert folder_of(Path(place, str(file.fileno()))) == tmp_path
    finally:
        recipe.unlink()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir("/")
    assert folder_of(tmp_path / "pipe") == Path("/")


def test_a_stored_hub_name_stays_a_name_beside_a_folder_of_that_name(load, tmp_path, monkeypatch):
    recipe = load(model="acme/base", sft={"data": "acme/rows"})
    (tmp_path / "other/acme/rows").mkdir(parents=True)
    (tmp_path / "other/acme/base").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    monkeypatch.setattr("alignment_core.data.origins.path.commit_of", lambda *_: "c")
    monkeypatch.setattr("alignment_core.data.hub.commit_of", lambda *_: "c")
    kept = parse_recipe(recipe.model_dump(mode="json"))
    assert pin(kept.sft.data.sources[0]).hub_commit == "c"  # type: ignore[attr-defined]
    assert pin_model(kept.model).commit == "c"


@pytest.mark.parametrize("path", ["~nosuchuser/rows.jsonl", "x" * 300 + ".jsonl"])
def test_a_path_that_cannot_be_looked_at_is_refused_with_its_field(load, path):
    with pytest.raises(UserError, match=r"sft.data.sources.0.path: .* cannot be accessed: "):
        load(sft={"data": path})


def test_no_part_of_a_recipe_remembers_its_folder(load):
    options: dict[str, Any] = {"correct": 0.5, "deep": [{"text": "one"}]}
    recipe = load(sft={"data": {"task": "reverse", "options": options}})
    assert yaml.safe_load(yaml.safe_dump(recipe.model_dump()["sft"]["data"]["sources"][0]["options"])) == options
    environment = {"name": "world.py:World", "options": {"map": ["t.py:f"]}}
    section = {"prompts": "p.jsonl", "rewards": [{"environment": True}], "environment": environment}
    rl = load(method="rl", sft=None, evaluation=None, rl=section).rl
    assert yaml.safe_dump(rl.environment.options)


UNUSED: dict[str, Any] = {
    "method": "rl",
    "name": "old",
    "model": "some/model",
    "rl": {
        "prompts": {"path": "/p.jsonl", "mixing": "all_exhausted"},
        "rewards": [{"verifier": "/v.py:f"}],
        "training": {"max_steps": 50},
    },
}


def test_fields_that_nothing_reads_are_refused_in_a_file_and_in_a_deployment_and_pass_in_a_stored_recipe(tmp_path):
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(UNUSED))
    with pytest.raises(UserError, match="has no effect"):
        load_recipe(tmp_path / "old.yaml")
    stored = parse_recipe(UNUSED)
    with pytest.raises(UserError, match="has no effect"):
        run_any(stored, ["seed=2"], None)
    del UNUSED["rl"]["training"], UNUSED["rl"]["prompts"]["mixing"]
    with pytest.raises(UserError, match="`max_steps` has no effect"):
        run_any(parse_recipe(UNUSED), ["rl.training.max_steps=50"], None)


@pytest.mark.parametrize("name", ["nightly", "iterative-dpo", "rlhf", "ppo"])
def test_an_existing_reward_model_can_replace_the_trained_one_in_shipped_recipes(name):
    path = FOLDER / f"{name}.yaml"
    whole = load_recipe(path, ["reward_model={model: policy/judge}"], path.parent)
    by_field = ["reward_model.model=policy/judge", "reward_model.data=null", "reward_model.training={}"]
    assert load_recipe(path, by_field, path.parent) == whole
    assert whole.reward_model.model.name == "policy/judge"  # type: ignore[attr-defined]
    if load_recipe(path, (), path.parent).reward_model.data is not None:  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=r"--set 'reward_model={model: NAME}'"):
            load_recipe(path, by_field[:1], path.parent)


def test_paths_of_shipped_recipes_are_the_same_by_hand_and_as_deployment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_hand = str(inbox_of(FOLDER / "nightly.yaml")[0].path)
    assert by_hand == f"{Path.home()}/.alignment/inbox/**/*.jsonl"
    for name, entry in shipped().items():
        flow = getattr(deployment_flows, entry.function)
        assert str(FOLDER.resolve().parent) not in str(deployments.form_of(flow)), name
    shown = deployments.form_of(deployment_flows.deployed_nightly)["properties"]["recipe"]["default"]
    ran: list[Any] = []
    monkeypatch.setattr("alignment.flows.nightly.one_night", lambda recipe, *_: ran.append(recipe))
    run_any(parse_recipe(shown), [], None)
    assert ran[0].dpo.data.sources[0].path == by_hand


def test_a_deployment_outlives_the_folder_of_its_recipe(load, tmp_path, monkeypatch):
    registered: dict[str, Any] = {}
    monkeypatch.setattr(deployments, "_find", lambda *_: None)
    client = SimpleNamespace(create_flow_from_name=str, create_deployment=lambda *_, **more: registered.update(more))
    deployments.register_recipe(client, "mine", load(model="some/model"), tmp_path / "recipes", None)  # type: ignore[arg-type]
    variables = registered["job_variables"]
    assert variables["working_dir"] == str(align_home())
    (tmp_path / "recipes/org/rows").mkdir(parents=True)
    ran: list[Any] = []
    monkeypatch.setattr("alignment.flows.recipe_flow.run_recipe", lambda recipe, *_: ran.append(recipe))
    monkeypatch.setattr(os, "environ", {**os.environ, **variables["env"]})
    run_any(parse_recipe(registered["parameters"]["recipe"]), ["evaluation.verifier=other.py:f"], None)
    assert ran[0].evaluation.verifier == f"{tmp_path}/recipes/other.py:f", "where the paths of overrides begin"
    assert ran[0].sft.data.sources[1].path == "org/rows", "it was a name when the recipe was deployed"
