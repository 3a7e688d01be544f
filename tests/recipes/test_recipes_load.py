"""Recipes: what may be written, what it becomes, and the sentence that every kind of mistake gets."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

import alignment_core.recipes
from alignment_core.errors import UserError
from alignment_core.recipes import BaseRecipe, DpoRecipe, IterativeDpoRecipe, SftRecipe, load_recipe
from alignment_core.recipes.base import Config
from alignment_core.recipes.recipe import BY_METHOD

SHIPPED = sorted((Path(__file__).parents[2] / "deployments" / "recipes").glob("*.yaml"))
SFT: dict[str, Any] = {"method": "sft", "name": "demo", "model": "some/model", "sft": {"data": "rows.jsonl"}}
ROUNDS: dict[str, Any] = {
    "method": "iterative-dpo",
    "name": "demo",
    "model": "some/model",
    "reward_model": {"data": "pairs.jsonl"},
    "iterative_dpo": {"prompts": "prompts.jsonl"},
}
JUDGE: dict[str, Any] = {
    "method": "reward-model",
    "name": "demo",
    "model": "m",
    "reward_model": {"data": "pairs.jsonl"},
}
NIGHT: dict[str, Any] = {
    "method": "nightly",
    "name": "demo",
    "model": "some/model",
    "dpo": {"data": "inbox"},
    "evaluation": {"prompts": "prompts.jsonl", "verifier": "checks.py:right"},
    "promotion": {"gates": [{"metric": "accuracy", "min_gain": 0}]},
}
Load = Callable[..., BaseRecipe]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """``load(content, *overrides)`` writes ``recipe.yaml`` (text, or data as YAML) and loads it."""
    monkeypatch.chdir(tmp_path)

    def written(content: Any, *overrides: str) -> BaseRecipe:
        Path("recipe.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return load_recipe(Path("recipe.yaml"), overrides)

    return written


def refusal(load: Load, content: Any, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(content, *overrides)
    return str(caught.value)


# ---------------------------------------------------------------- mistakes of one field


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sft.training.learning_rat=1", "sft.training.learning_rat: unknown field; did you mean 'learning_rate'?"),
        ("sft.data=[{path: a, formt: text}]", "sft.data.sources.0.formt: unknown field; did you mean 'format'?"),
        ("sft.data={path: a, formt: text}", "sft.data.formt: unknown field; did you mean 'format'?"),
        ("sft.data={path: a, test_row: 3}", "sft.data.test_row: unknown field; did you mean 'test_rows'?"),
        ("model={scratch: {hidden: 64}}", "model.scratch.hidden: unknown field; did you mean 'hidden_size'?"),
        (
            "zzz=1",
            "zzz: unknown field; known here: evaluation, method, model, name, promotion, resources, retention, seed, "
            "sft, store, tracking",
        ),
        (
            "evaluation={prompts: p, generation: {temprature: 1}}",
            "evaluation.generation.temprature: unknown field; did you mean 'temperature'?",
        ),
        ("promotion={gates: [{metric: kl, mx: 1}]}", "promotion.gates.0.mx: unknown field; did you mean 'max'?"),
    ],
)
def test_an_unknown_field_is_named_by_its_full_path_with_its_nearest_neighbour(load, override, sentence):
    assert refusal(load, SFT, override).splitlines()[0] == f"recipe.yaml: {sentence}"


@pytest.mark.parametrize("missing", ["name", "model", "sft"])
def test_a_missing_field_is_named(load, missing):
    content = {name: value for name, value in SFT.items() if name != missing}
    assert refusal(load, content) == f"recipe.yaml: {missing}: is missing and has no default"


@pytest.mark.parametrize(
    ("override", "where", "got"),
    [
        ("seed=first", "seed", "'first'"),
        ("seed=1.5", "seed", "1.5"),
        ("seed=-1", "seed", "-1"),
        ("name=Bad Name", "name", "'Bad Name'"),
        ("sft.training.batch_size=many", "sft.training.batch_size", "'many'"),
        ("sft.training.batch_size=0", "sft.training.batch_size", "0"),
        ("sft.training.lr_scheduler_type=cosin", "sft.training.lr_scheduler_type", "'cosin'"),
        ("sft.training.learning_rate=.nan", "sft.training.learning_rate", "nan"),
        ("sft.training.learning_rate=.inf", "sft.training.learning_rate", "inf"),
        ("sft.data=3", "sft.data", "3"),
        ("sft.data=", "sft.data", "None"),
        ("sft.data=[]", "sft.data.sources", "[]"),
        ("model=[a]", "model", "['a']"),
        ("sft=rows", "sft", "'rows'"),
        ("model={scratch: {architecture: gpt9}}", "model.scratch.architecture", "'gpt9'"),
    ],
)
def test_a_wrong_type_or_value_is_named_and_shown(load, override, where, got):
    (line,) = refusal(load, SFT, override).splitlines()
    assert line.startswith(f"recipe.yaml: {where}: ")
    assert line.endswith(f"; got {got}")


@pytest.mark.parametrize("path", ["seed", "sft.training.batch_size", "sft.training.learning_rate"])
def test_a_truth_value_is_no_number(load, path):
    (line,) = refusal(load, SFT, f"{path}=yes").splitlines()
    assert line == f"recipe.yaml: {path}: a number is needed (YAML reads yes, no, on and off as truth values)"


def test_every_mistake_gets_its_own_line(load):
    lines = refusal(load, SFT, "seed=-1", "zzz=1", "model={scratch: {hidden: 1}}").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["seed", "model.scratch.hidden", "zzz"]


# ---------------------------------------------------------------- method


@pytest.mark.parametrize(("method", "nearest"), [("sftt", "sft"), ("reward_model", "reward-model"), ("grpo", "rl")])
def test_an_unknown_method_gets_the_list_and_the_nearest(load, method, nearest):
    assert refusal(load, SFT | {"method": method}) == (
        f"recipe.yaml: method: is {method!r}; choose one of sft, reward-model, dpo, iterative-dpo, rl, nightly; "
        f"did you mean {nearest!r}?"
    )


def test_a_missing_method_gets_the_list(load):
    content = {name: value for name, value in SFT.items() if name != "method"}
    assert "method: is missing; choose one of sft, reward-model, dpo, iterative-dpo, rl, nightly" in refusal(
        load, content
    )


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("method: sft\nname: [a\nmodel: x\n", "3:6", "expected ',' or ']', but got ':'"),
        ("a: b: c\n", "1:5", "mapping values are not allowed here"),
        ("method: sft\n\tname: x\n", "2:1", "found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "2:1", "but found another document"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "2:17", "the field 'c' is there twice"),
    ],
)
def test_a_syntax_error_says_line_and_column(load, text, place, problem):
    assert refusal(load, text) == f"recipe.yaml:{place}: not valid YAML: {problem}"


def test_a_forbidden_character_is_one_sentence_too(load):
    assert len(refusal(load, "a: \x01\n").splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "kind"), [("", "empty"), ("- a\n", "a list"), ("hello\n", "text"), ("3\n", "a number")]
)
def test_a_recipe_is_a_mapping(load, text, kind):
    assert refusal(load, text) == f"recipe.yaml: a recipe is a mapping of fields, this is {kind}"


def test_yaml_cannot_run_code(load):
    assert "could not determine a constructor" in refusal(load, "!!python/object/apply:os.system [true]\n")


def test_a_missing_file_gets_the_nearest_name(tmp_path):
    (tmp_path / "quickstart.yaml").touch()
    with pytest.raises(UserError, match=r"quickstrat\.yaml: no such recipe file; did you mean .*/quickstart\.yaml\?$"):
        load_recipe(tmp_path / "quickstrat.yaml")
    with pytest.raises(UserError, match=r"no such recipe file$"):
        load_recipe(tmp_path / "nowhere" / "quickstart.yaml")


def test_a_folder_and_a_binary_file_cannot_be_read_as_text(tmp_path):
    (tmp_path / "weights.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "weights.yaml"):
        with pytest.raises(UserError, match="cannot be read as text"):
            load_recipe(path)


# ---------------------------------------------------------------- --set


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed", "--set seed: write it as path=value, such as sft.training.learning_rate=1e-4"),
        ("=3", "--set =3: write it as path=value, such as sft.training.learning_rate=1e-4"),
        ("seed=[1", "--set seed=[1: the value is not valid YAML; quote it"),
        ("seed.x.y=1", "--set seed.x.y=1: there is nothing below 5, so 'x' cannot be set"),
        ("sft.data.2=c", "--set sft.data.2=c: '2' is not an index of a list with 2 items"),
        ("sft.data.last=c", "--set sft.data.last=c: 'last' is not an index of a list with 2 items"),
        ("sft.data.0.path=c", "--set sft.data.0.path=c: there is nothing below 'a.jsonl', so 'path' cannot be set"),
        ("sft.trainin.batch_size=1", "recipe.yaml: sft.trainin: unknown field; did you mean 'training'?"),
    ],
)
def test_a_wrong_override_gets_its_sentence(load, override, sentence):
    content = SFT | {"seed": 5, "sft": {"data": ["a.jsonl", "b.jsonl"]}}
    assert refusal(load, content, override) == sentence


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("2.5e-3", 2.5e-3), ("0.5", 0.5)])
def test_an_override_reads_numbers_as_people_write_them(load, text, value):
    assert load(SFT, f"sft.training.learning_rate={text}").sft.training.learning_rate == value


def test_a_name_with_an_e_stays_a_name(load):
    assert load(SFT, "model=google/gemma-e2").model.name == "google/gemma-e2"


def test_overrides_reach_into_lists_make_missing_sections_and_the_last_one_wins(load):
    content = SFT | {"sft": {"data": ["a.jsonl", {"path": "b.jsonl"}]}}
    recipe = load(content, "sft.data.1.rows=7", "sft.training.batch_size=4", "seed=1", "seed=2", "store=/a=b")
    assert [source.rows for source in recipe.sft.data.sources] == [None, 7]
    assert (recipe.sft.training.batch_size, recipe.seed, recipe.store) == (4, 2, "/a=b")


def test_an_override_does_not_change_what_it_was_applied_to():
    content = {"a": {"b": [1, 2]}}
    assert alignment_core.recipes.apply_overrides(content, ["a.b.0=9"]) == {"a": {"b": [9, 2]}}
    assert content == {"a": {"b": [1, 2]}}


# ---------------------------------------------------------------- rules between fields


@pytest.mark.parametrize(
    ("content", "override", "sentence"),
    [
        (SFT, "model={}", "model: give exactly one of `name` (Hub name, folder or reference) and `scratch`"),
        (SFT, "model={name: a, scratch: {}}", "model: give exactly one of `name`"),
        (SFT, "model={scratch: {hidden_size: 10, num_attention_heads: 3}}", "hidden_size 10 is not a multiple of"),
        (SFT, "model={scratch: {num_key_value_heads: 3}}", "is not a multiple of num_key_value_heads"),
        (SFT, "sft.data=[{path: a, task: reverse}]", "sft.data.sources.0: give exactly one of `path`"),
        (SFT, "sft.data=[{rows: 3}]", "sft.data.sources.0: give exactly one of `path`"),
        (
            SFT,
            "sft.data=[{path: a, options: {correct: 1}}]",
            "sft.data.sources.0: `options` belong to a `task`",
        ),
        (SFT, "sft.data=[{path: a, weight: 1}, b]", "sft.data: give `weight` for every source or for none"),
        (SFT, "sft.data={path: a, sources: [b]}", "sft.data: give either `sources` or the origin"),
        (SFT, "promotion={gates: [{metric: kl, max: 1}]}", "`promotion.gates` need an `evaluation`"),
        (SFT, "promotion={gates: [{metric: kl}]}", "promotion.gates.0: a gate needs at least one of `min`, `max`"),
        (ROUNDS, "reward_model=", "`reward_model` is needed, because `iterative_dpo.selection.score` is `reward`"),
        (ROUNDS, "reward_model={}", "`reward_model` needs exactly one of `data` (train one) and `model`"),
        (ROUNDS, "reward_model.model=judge", "`reward_model` needs exactly one of `data` (train one) and `model`"),
        (ROUNDS, "iterative_dpo.selection.score=verifier", "`evaluation.verifier` is needed"),
        (
            SFT,
            "evaluation={prompts: p.jsonl, verifier: task}",
            "evaluation: `verifier: task` scores the built-in tasks",
        ),
        (
            ROUNDS | {"iterative_dpo": {"prompts": "prompts.jsonl", "selection": {"score": "verifier"}}},
            "evaluation={prompts: {task: reverse}, verifier: task}",
            "of `iterative_dpo.prompts` is none; name a function",
        ),
        (JUDGE, "reward_model={model: judge}", "`reward_model.data` is needed here, and `reward_model.model` is not"),
        (JUDGE, "evaluation.prompts=p", "remove `evaluation`, `promotion`"),
    ],
)
def test_fields_that_do_not_fit_together_get_one_sentence(load, content, override, sentence):
    (line,) = refusal(load, content, override).splitlines()
    assert sentence in line


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "dpo.data={task: reverse}",
            "`dpo.data.sources.0`: rows arrive in a file, folder, glob or `store:` prefix; give",
        ),
        ("dpo.data={path: inbox, rows: 5}", "give `path` and, if need be, `format` and `columns`, and nothing else"),
        ("dpo.data={path: inbox, test_rows: 9}", "`dpo.data.test_rows` (9) must be less than `nightly.min_rows` (1)"),
        ("promotion.gates=[]", "`promotion.gates` needs at least one gate"),
        ("promotion=null", "promotion"),
        ("evaluation=null", "evaluation"),
        ("iterative_dpo={prompts: prompts.jsonl}", "`reward_model` is needed, because `iterative_dpo.selection.score`"),
        ("reward_model={}", "`reward_model` needs exactly one of `data` (train one) and `model` (use that one)"),
        ("nightly.inbox=Inbox/1", "nightly.inbox"),
    ],
)
def test_a_night_that_could_not_run_unattended_is_refused(load, override, sentence):
    assert sentence in refusal(load, NIGHT, override)


def test_a_night_needs_no_section_of_its_own(load):
    assert load(NIGHT).nightly.min_rows == 1
    assert load(NIGHT, "iterative_dpo={prompts: p.jsonl, selection: {score: verifier}}").iterative_dpo.rounds == 2


# ---------------------------------------------------------------- shorthand and defaults


def test_a_bare_string_is_the_name_of_a_model():
    assert SftRecipe.model_validate(SFT).model.name == "some/model"


@pytest.mark.parametrize(
    "short",
    [
        "rows.jsonl",
        ["rows.jsonl"],
        [{"path": "rows.jsonl"}],
        {"path": "rows.jsonl"},
        {"sources": ["rows.jsonl"]},
        {"sources": [{"path": "rows.jsonl"}]},
    ],
)
def test_all_forms_of_one_source_mean_the_same(load, short):
    assert load(SFT | {"sft": {"data": short}}) == load(SFT)


def test_a_short_source_shares_its_mapping_with_the_data_set(load):
    data = load(SFT | {"sft": {"data": {"task": "reverse", "rows": 9, "test_rows": 2}}}).sft.data
    assert (data.sources[0].task, data.sources[0].rows, data.test_rows) == ("reverse", 9, 2)


def test_a_recipe_without_a_reward_model_may_be_judged_by_a_verifier(load):
    content = ROUNDS | {"reward_model": None, "evaluation": {"prompts": "p", "verifier": "checks.py:right"}}
    recipe = load(content, "iterative_dpo.selection.score=verifier")
    assert isinstance(recipe, IterativeDpoRecipe)
    assert recipe.reward_model is None


def test_preference_training_has_a_smaller_default_learning_rate(load):
    recipe = load({"method": "dpo", "name": "d", "model": "m", "dpo": {"data": "pairs.jsonl"}})
    assert isinstance(recipe, DpoRecipe)
    assert recipe.dpo.training.learning_rate == 1e-6


# ---------------------------------------------------------------- the recipes that come with the project


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_is_named_like_its_file_and_survives_a_round_trip(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert alignment_core.recipes.parse_recipe(recipe.model_dump(mode="json")) == recipe


def test_every_method_has_a_shipped_recipe():
    assert {load_recipe(path).method for path in SHIPPED} == set(BY_METHOD)


# ---------------------------------------------------------------- every configuration class


def configs() -> list[type[BaseModel]]:
    for module in pkgutil.walk_packages(alignment_core.recipes.__path__, "alignment_core.recipes."):
        importlib.import_module(module.name)
    found, waiting = [], [Config]
    while waiting:
        below = [one for one in waiting.pop().__subclasses__() if one.__module__.startswith("alignment_core.recipes")]
        found += below
        waiting += below
    return found


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.__name__)
def test_every_field_has_a_description_and_every_class_a_docstring(config):
    assert config.__doc__
    assert [name for name, field in config.model_fields.items() if not field.description] == []


def test_a_recipe_cannot_be_changed(load):
    recipe = load(SFT)
    for target, name in ((recipe, "seed"), (recipe.sft.training, "batch_size"), (recipe.model, "name")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(target, name, 3)
    assert isinstance(recipe.sft.data.sources, tuple)


# ---------------------------------------------------------------- reinforcement learning


RL: dict[str, Any] = {
    "method": "rl",
    "name": "demo",
    "model": "some/model",
    "rl": {"prompts": "prompts.jsonl", "rewards": [{"verifier": "checks.py:right"}]},
}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rl.rewards=[]"], "rl.rewards"),
        (
            ["rl.rewards.0.reward_model=ours"],
            "a reward needs exactly one of `verifier`, `reward_model`, `function`, `urls`",
        ),
        (
            ["rl.rewards.0.function=f.py:f"],
            "a reward needs exactly one of `verifier`, `reward_model`, `function`, `urls`",
        ),
        (["rl.rewards.0={urls: 'localhost:5000'}"], "'localhost:5000' is no http:// or https:// URL"),
        (["rl.rewards.0={urls: 'http://me:hidden@there/'}"], "a URL of a recipe holds no password; name the variable"),
        (["rl.rewards.0.token_variable=TOKEN"], "`token_variable` is for `urls`"),
        (["rl.rewards.0.clip=[1, 0]"], "`clip` needs a lower and then an upper bound"),
        (["rl.rewards.0={reward_model: ours}"], "asks for the reward model `ours`: add a section `reward_model`"),
        (["reward_model={data: pairs.jsonl}"], "nothing uses `reward_model`"),
        (["rl.rewards.0.verifier=task"], "prompts.jsonl of `rl.prompts` is none"),
        (["rl.advantage.estimator=gae"], "`rl.critic` and the estimator `gae` need each other"),
        (["rl.critic={}"], "`rl.critic` and the estimator `gae` need each other"),
        (["rl.generation.temperature=0"], "`rl.generation` samples from the policy itself"),
        (["rl.generation.top_p=0.9"], "leave `top_p`, `top_k` and `min_p` out"),
        (["rl.environment={name: 'e.py:E'}"], "`rl.environment` and a reward with `environment: true` need each other"),
        (["resources={offload_optimizer: true, zero_stage: 0}"], "`offload_optimizer` needs `zero_stage` 1, 2 or 3"),
        (["rl.result=average"], "`rl.result: average` needs the section `rl.ema`: add `ema: {}`"),
        (["rl.result=best"], "`rl.result: best` needs the section `rl.best`: add `best: {prompts: …}`"),
        (
            ["rl.rewards.0.verifier=task", "rl.prompts={task: reverse, rows: 8}", "rl.best={prompts: held_out.jsonl}"],
            "held_out.jsonl of `rl.best.prompts` is none",
        ),
        (["rl.generation.num_generations=1"], "a prompt's completions have no mean but their own"),
        (
            ["rl.generation.num_generations=1", "rl.advantage.estimator=batch", "rl.filter={}"],
            "`rl.filter` would leave out all: raise it, or drop the filter",
        ),
        (
            ["rl.training.max_steps=5"],
            "`max_steps` has no effect in `rl.training`, as `rl.steps` says how many steps there are",
        ),
        (
            ["rl.loss={loss_type: sapo, clip_high: 0.3}"],
            "`clip_high` has no effect with `loss_type: sapo`: leave it out",
        ),
        (["rl.loss={loss_type: cispo, dual_clip: 3}"], "`dual_clip` has no effect with `loss_type: cispo`"),
        (["rl.loss.sapo_temperatures=[1, 2]"], "`sapo_temperatures` has no effect with `loss_type: clip`"),
        (["rl.advantage.gae_lambda=0.9"], "`gae_lambda` has no effect with `estimator: group`"),
        (["rl.kl={coefficient: 0.1, place: reward, unbiased_gradient: true}"], "which has no gradient"),
        (["rl.rewards.0.batch_size=4"], "`batch_size` has no effect without `urls`"),
        (
            ["rl.prompts={task: reverse, subset: main}"],
            "`subset` has no effect without a data set of the Hub in `path`",
        ),
        (
            ["rl.prompts={path: p.jsonl, mixing: all_exhausted}"],
            "`mixing` has no effect without a `weight` of each source",
        ),
        (["model={scratch: {}, revision: main}"], "`revision` has no effect with `scratch`"),
        (["rl.filter={low: 0.5, high: 0.5}"], "`low` 0.5 is not below `high` 0.5, so that no prompt would stay"),
    ],
)
def test_sections_of_rl_that_do_not_fit_together_are_refused(load, overrides, says):
    assert says in refusal(load, RL, *overrides)


def test_a_plain_section_rl_is_enough(load):
    assert load(RL).samples


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["iterative_dpo.loss={loss_type: ipo, label_smoothing: 0.1}"], "`label_smoothing` has no effect with"),
        (["iterative_dpo.selection.max_pairs_per_prompt=3"], "has no effect with `strategy: best_worst`"),
        (
            ["reward_model={model: some/judge, training: {batch_size: 8}}"],
            "`training` has no effect where `model` names",
        ),
        (["reward_model={model: some/judge, loss_type: logexp}"], "`loss_type` has no effect where `model` names"),
    ],
)
def test_fields_that_nothing_would_read_are_refused(load, overrides, says):
    assert says in refusal(load, ROUNDS, *overrides)
    loaded = load(ROUNDS, "reward_model={model: some/judge}")
    assert alignment_core.recipes.parse_recipe(loaded.model_dump(mode="json")) == loaded, (
        "defaults that are written out are none"
    )
