"""Recipes that no parser can take: one sentence, no stack of recursions."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from alignment_core.errors import UserError
from alignment_core.recipes import yaml_values
from alignment_core.recipes.load import apply_overrides, load_recipe

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
"""Each list holds ten times the one before: 10^9 texts in 500 characters."""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("&a {x: *a}", "an alias stands inside its own anchor"),
        ("x: &a [1, *a]", "an alias stands inside its own anchor"),
        ("x: &a {y: {z: [*a]}}", "an alias stands inside its own anchor"),
        ("[" * 5000, "it is nested too deeply"),
        ("x: " + "{a: " * 5000 + "1" + "}" * 5000, "it is nested too deeply"),
        ("x: " + "9" * 5000, "digits"),
        ("x: " + "9" * 400, "the number has too many digits"),
        ("x: 0x" + "f" * 5000, "the number has too many digits"),
        (BOMB, "its aliases stand for more than 1,000,000 values"),
    ],
)
def test_a_recipe_that_cannot_be_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    started = time.monotonic()
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        load_recipe(file)
    assert len(str(caught.value)) < 400
    with pytest.raises(yaml.YAMLError):
        yaml_values.load(text)
    assert time.monotonic() - started < 30


def test_values_of_options_are_refused_the_same_way() -> None:
    for value in ("&a {x: *a}", "[" * 5000):
        with pytest.raises(UserError, match="the value is not valid YAML"):
            apply_overrides({}, [f"a={value}"])


def test_anchors_that_are_used_often_and_large_numbers_stay_allowed() -> None:
    shared = yaml_values.load(
        "a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: *a}\nd: [*a, *a]\ne: 123456789012345678901234567890"
    )
    assert shared["b"] == shared["c"]["y"] == shared["d"][1] == {"x": [1, 2]}
    assert shared["c"]["x"] == [1, 2]
    assert shared["e"] == 123456789012345678901234567890
