"""Fields of a recipe that merges models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.recipes.contents import Load, refusal


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"models": [{"model": "a/b"}]}, "merge.models: tuple should have at least 2 items"),
        ({"models": [{"model": "a/b"}, {"model": "a/b"}]}, "`models.1` is the same model as one before it"),
        ({"models": [{"model": "a/b", "weight": 0}, {"weight": 0}]}, "all weights are 0"),
        ({"models": [{"model": name} for name in ("a/b", "a/c", "a/d")], "merge_method": "slerp"}, "slerp` takes two"),
        ({"models": [{"model": "a/b"}, {}], "density": 0.5}, "`density` has no effect with `merge_method: linear`"),
    ],
)
def test_inconsistent_fields_are_refused(section: dict[str, Any], says: str, load: Load) -> None:
    assert says in refusal(load, {"method": "merge", "name": "m", "model": "a/base", "merge": section})
