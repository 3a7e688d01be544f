"""Recipes: valid notations, and the sentence for each kind of mistake."""

from __future__ import annotations

import pytest

import alignment_core.recipes
from alignment_core.errors import UserError
from alignment_core.recipes import load_recipe
from tests.recipes.contents import METHODS, SFT, refusal

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
            "zzz: unknown field; known here: evaluation, method, model, name, promotion, resources, retention, "
            "reuse_across_versions, seed, sft, store, tracking",
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
    ("override", "where", "shown"),
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
def test_a_wrong_type_or_value_is_named_and_shown(load, override, where, shown):
    (line,) = refusal(load, SFT, override).splitlines()
    assert line.startswith(f"recipe.yaml: {where}: ")
    assert line.endswith(f"; got {shown}")


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
        f"recipe.yaml: method: is {method!r}; choose one of {', '.join(METHODS)}; did you mean {nearest!r}?"
    )


def test_a_missing_method_gets_the_list(load):
    content = {name: value for name, value in SFT.items() if name != "method"}
    assert f"method: is missing; choose one of {', '.join(METHODS)}" in refusal(load, content)


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("method: sft\nname: [a\nmodel: x\n", "3:6", "expected ',' or ']', but got ':'"),
        ("a: b: c\n", "1:5", "mapping values are not allowed here"),
        ("method: sft\n\tname: x\n", "2:1", "found character '\\t' that cannot start any token"),
        ("a: 1\n---\nb: 2\n", "2:1", "but found another document"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "2:17", "the field 'c' occurs twice"),
    ],
)
def test_a_syntax_error_has_line_and_column(load, text, place, problem):
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
        ("seed.x.y=1", "--set seed.x.y=1: there is nothing inside 5, so 'x' cannot be set"),
        ("sft.data.2=c", "--set sft.data.2=c: '2' is not an index of a list with 2 items"),
        ("sft.data.last=c", "--set sft.data.last=c: 'last' is not an index of a list with 2 items"),
        ("sft.data.0.path=c", "--set sft.data.0.path=c: there is nothing inside 'a.jsonl', so 'path' cannot be set"),
        ("sft.trainin.batch_size=1", "recipe.yaml: sft.trainin: unknown field; did you mean 'training'?"),
    ],
)
def test_a_wrong_override_gets_its_sentence(load, override, sentence):
    content = SFT | {"seed": 5, "sft": {"data": ["a.jsonl", "b.jsonl"]}}
    assert refusal(load, content, override) == sentence


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("2.5e-3", 2.5e-3), ("0.5", 0.5)])
def test_an_override_reads_common_notations_of_numbers(load, text, value):
    assert load(SFT, f"sft.training.learning_rate={text}").sft.training.learning_rate == value


def test_a_name_with_an_e_stays_a_name(load):
    assert load(SFT, "model=google/gemma-e2").model.name == "google/gemma-e2"


def test_overrides_reach_into_lists_make_missing_sections_and_the_last_one_wins(load):
    content = SFT | {"sft": {"data": ["a.jsonl", {"path": "b.jsonl"}]}}
    recipe = load(content, "sft.data.1.rows=7", "sft.training.batch_size=4", "seed=1", "seed=2", "store=/a=b")
    assert [source.rows for source in recipe.sft.data.sources] == [None, 7]
    assert (recipe.sft.training.batch_size, recipe.seed, recipe.store) == (4, 2, "/a=b")


def test_an_override_does_not_change_its_input():
    content = {"a": {"b": [1, 2]}}
    assert alignment_core.recipes.apply_overrides(content, ["a.b.0=9"]) == {"a": {"b": [9, 2]}}
    assert content == {"a": {"b": [1, 2]}}
