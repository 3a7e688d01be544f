"""Numbers are those of YAML 1.2's core schema (YAML 1.2.2, section 10.3.2) wherever recipes are written; merge keys work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.errors import UserError
from alignment_core.recipes import apply_overrides, load_recipe, parse_recipe
from alignment_core.recipes.paths import plain
from alignment_core.recipes.yaml_values import load

RL = """
method: rl
name: numbers
model: {scratch: {}}
rl:
  prompts: {task: first, rows: 20}
  environment: {name: "env:E", options: {p: %s, text: "%s"}}
  rewards: [{environment: true}]
resources: {deepspeed: {zero_optimization: {sub_group_size: %s}}, engine_options: {x: [%s]}}
"""
SFT = "method: sft\nname: a\nmodel: %s\nsft: {data: {task: first, rows: 20}, training: {learning_rate: %s, batch_size: %s}}\n"


def recipe(tmp_path: Path, text: str, *overrides: str, sweeps: tuple[str, ...] = ()) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides, tmp_path, sweeps)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-3", 0.001), ("1E3", 1000.0), ("+5e-1", 0.5), ("-2e2", -200.0), ("1.e5", 1e5), (".5e-4", 5e-5)],
        *[("1.5e5", 1.5e5), ("2.5e-3", 0.0025), ("0.", 0.0), ("12", 12), ("-012", -12), ("010", 10)],
        *[("0o17", 15), ("0x1f", 31), (".inf", float("inf")), ("-.INF", float("-inf"))],
        *[("1_000", "1_000"), ("1:30", "1:30"), ("0b11", "0b11"), ("e5", "e5"), ("1e", "1e"), ("1e5x", "1e5x")],
        *[("2024-01-02", "2024-01-02"), ("2024-01-02 10:30:00", "2024-01-02 10:30:00")],
        *[("1.2.3", "1.2.3"), ("'1e-3'", "1e-3"), ('"12"', "12"), ("1234e567", "1234e567")],
    ],
)
def test_a_value_is_parsed_by_the_core_schema(text: str, value: Any) -> None:
    read = plain(load(f"{{a: {text}}}"))["a"]
    assert (read, type(read)) == (value, type(value))


def test_options_get_numbers_from_files_and_from_set(tmp_path: Path) -> None:
    text = RL % ("1e-3", "1e-3", "1e9", "5e-1")
    override = "rl.environment.options.q=2e-4"
    for read in (
        recipe(tmp_path, text, override),
        parse_recipe(recipe(tmp_path, text, override).model_dump(mode="json")),
    ):
        assert read.rl.environment.options == {"p": 0.001, "text": "1e-3", "q": 0.0002}
        assert read.resources.deepspeed == {"zero_optimization": {"sub_group_size": 1e9}}
        assert read.resources.engine_options == {"x": [0.5]}


def test_typed_fields_get_numbers_and_texts_stay_texts(tmp_path: Path) -> None:
    for model in ("1234e567", "12e3"):
        read = recipe(tmp_path, SFT % (model, "2E-4", "1e1"))
        assert (read.model.name, read.sft.training.learning_rate, read.sft.training.batch_size) == (model, 2e-4, 10)
        read = recipe(tmp_path, SFT % ("{scratch: {}}", 1, 1), f"model={model}", "sft.training.batch_size=1e1")
        assert (read.model.name, read.sft.training.batch_size) == (model, 10)


def test_values_of_a_sweep_are_numbers_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    data = "data: {task: first, rows: 20, test_rows: 4}"
    base = f"method: sft\nname: a\nmodel: {{scratch: {{}}}}\nsft: {{{data}}}\n"
    swept = f"method: sweep\nname: s\nmodel: {{scratch: {{}}}}\nbase: {{method: sft, sft: {{{data}}}}}\n"
    of_file = recipe(tmp_path, swept + "sweep: {sft.training.learning_rate: [1e-5, 2e-5]}\n")
    of_line = recipe(tmp_path, base, sweeps=("sft.training.learning_rate=1e-5,2e-5",))
    for read in (of_file, of_line):
        assert read.sweep == {"sft.training.learning_rate": (1e-5, 2e-5)}
        assert [variant.sft.training.learning_rate for variant in read.variants.values()] == [1e-5, 2e-5]
    with pytest.raises(UserError, match="has the same value twice"):
        recipe(tmp_path, swept + "sweep: {sft.training.learning_rate: [1e-5, 0.00001]}\n")


MERGED = {
    "same depth": "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, z: 3}\n",
    "used above its own depth": "o:\n  a: &a {x: 1, y: 1}\n  p:\n    b: &b {<<: *a, x: 2}\nc: {<<: *b, z: 3}\n",
    "used twice": "o: [{p: &a {x: 1}}, {p: &b {<<: *a, x: 2}}]\nc: {<<: *b, x: 3}\nd: {<<: *b, x: 4}\n",
    "a list": "a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: [*a, *b], x: 5}\n",
    "in a list": "a: [&a {x: 1}, {<<: *a, x: 2}]\n",
    "a number and its text": "a: {1: one, '1': text}\n",
}


@pytest.mark.parametrize("name", MERGED)
def test_merge_keys_are_resolved_as_by_yamls_own_loader(name: str) -> None:
    assert load(MERGED[name]) == yaml.safe_load(MERGED[name])


@pytest.mark.parametrize("text", ["a: {x: 1, x: 2}", "a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}", "a: 1\nb: 2\na: 3"])
def test_a_field_that_really_occurs_twice_is_an_error(text: str) -> None:
    with pytest.raises(yaml.MarkedYAMLError, match="occurs twice"):
        load(text)


def test_a_repeated_field_in_an_override_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"--set a=\{x: 1, x: 2\}: the value is not valid YAML: the field 'x' occurs twice"
    ):
        apply_overrides({}, ["a={x: 1, x: 2}"])
