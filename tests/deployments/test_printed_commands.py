"""Commands that the program, its recipes and its pages print have to work where only the wheel is installed, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from alignment.flows.shipped_recipes import file_of, shipped

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "README.md",
    *(ROOT / "deployments" / "recipes").rglob("*.yaml"),
    *(file for name in ("alignment_core", "flows", "tasks") for file in (ROOT / name).rglob("*.py")),
]
PRINTED = re.compile(r"\balign (?:run|check|deploy|init --from) (?:--[\w-]+ )*([^\s`'\"|]+)")


def commands() -> list[tuple[str, str]]:
    return [(str(page.relative_to(ROOT)), recipe) for page in PAGES for recipe in PRINTED.findall(page.read_text())]


def test_no_command_names_a_recipe_by_its_place_in_a_checkout() -> None:
    assert [(page, recipe) for page, recipe in commands() if "deployments/" in recipe] == []


def test_recipes_that_commands_name_are_installed() -> None:
    named = {recipe for _, recipe in commands() if re.fullmatch(r"[a-z][a-z-]+", recipe)}
    words = {
        "with",
        "and",
        "calls",
        "again",
        "or",
        "for",
        "in",
        "it",
        "that",
        "looks",
        "starts",
        "does",
        "after",
        "has",
    }
    assert "quickstart" in named
    assert named - words <= {*shipped()}, named - words - {*shipped()}


@pytest.mark.parametrize("name", sorted(shipped()))
def test_recipes_recommended_by_shipped_recipes_are_shipped(name: str) -> None:
    for recipe in PRINTED.findall(shipped()[name].path.read_text()):
        assert file_of(Path(recipe)).is_file()
