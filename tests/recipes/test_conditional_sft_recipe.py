"""Recipes of conditional SFT: templates, bins, and inconsistent fields."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.recipes import parse_recipe
from tests.recipes.contents import refusal

SECTION: dict[str, Any] = {
    "prompts": "p.jsonl",
    "attributes": {"good": {"reward": {"verifier": "math"}}, "long": {"reward": {"verifier": "math"}, "bins": 3}},
    "wanted": [{"good": 1, "long": 2}],
}
RECIPE: dict[str, Any] = {"method": "conditional-sft", "name": "demo", "model": "m", "conditional_sft": SECTION}


def test_the_wanted_values_are_written_as_those_of_the_rows() -> None:
    section = parse_recipe(RECIPE).conditional_sft  # type: ignore[attr-defined]
    assert section.prompt_template == "{prompt} [good={good} long={long}]"
    assert section.wanted_template({"good": 0.5, "long": 2}) == "{prompt} [good=0.50 long=2]"


def test_there_is_one_zero() -> None:
    attribute = parse_recipe(RECIPE).conditional_sft.attributes["good"]  # type: ignore[attr-defined]
    assert [attribute.written(value) for value in (-0.001, -0.0, 0.001, -0.01)] == ["0.00", "0.00", "0.00", "-0.01"]


def test_braces_of_a_template_and_of_the_prompts_own_stay() -> None:
    changes = {"template": "{{good}}={good} {long} {prompt}"}
    section = parse_recipe({**RECIPE, "conditional_sft": {**SECTION, **changes}}).conditional_sft  # type: ignore[attr-defined]
    template = section.wanted_template({"good": 1, "long": 0}, "{{x}} {prompt} {level:>3}")
    assert template == "{{good}}=1.00 0 {{x}} {prompt} {level:>3}"
    assert template.format(prompt="p", level=7) == "{good}=1.00 0 {x} p   7"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"wanted": []}, "conditional_sft.wanted"),
        ({"wanted": [{"good": 1}]}, "`wanted.0` needs a value of each attribute and of no other: see 'long'"),
        ({"wanted": [{"good": 1, "long": 3}]}, "`wanted.0.long` is 3; the bins are 0 to 2"),
        ({"template": "{prompt} {good}"}, "`template` has no {long}: add it, or remove the attribute"),
        ({"template": "{good} {long}"}, "`prompt_template` has no {prompt}"),
        ({"attributes": {"a b": {"reward": {"verifier": "math"}}}}, "'a b' cannot name one"),
        (
            {"attributes": {"tools": {"reward": {"verifier": "math"}}}, "wanted": [{"tools": 1}]},
            "'tools' cannot name one",
        ),
        (
            {"attributes": {"good": {"reward": {"verifier": "math", "normalise": "group"}}}, "wanted": [{"good": 1}]},
            "`attributes.good.reward.normalise`: values are not normalised",
        ),
        (
            {"attributes": {"good": {"reward": {"reward_model": "ours"}}}, "wanted": [{"good": 1}]},
            "`conditional_sft.attributes` refers to the reward model `ours`: add a section `reward_model`",
        ),
        ({"training": {"eval_steps": 3}}, "`eval_steps` has no effect in `conditional_sft.training`"),
    ],
)
def test_inconsistent_fields_are_refused_in_a_sentence(load: Any, changes: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(load, {**RECIPE, "conditional_sft": {**SECTION, **changes}})
