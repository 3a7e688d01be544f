"""What a stage's record names beside its inputs and outputs: the recipe, the user's source and the environment of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from alignment_core.canonical import canonical_json
from alignment_core.credentials import cut
from alignment_core.execution.environment import environment

if TYPE_CHECKING:
    from alignment_core.recipes import BaseRecipe

RECIPE, ENVIRONMENT, USER_CODE = "recipe", "environment", "user-code"
"""Kinds of these artifacts, and their roles in a record."""
RECIPE_FILE, SETTINGS_FILE = "recipe.yaml", "settings.json"
"""The recipe as it was written, with the overrides of the run; and all of its settings, with those that it left to the
defaults of this version."""
ENVIRONMENT_FILE = "environment.json"
FILES = "files.json"
"""The name of each file in the artifact, by the user's path, and the paths of those from which secrets were cut."""


def recipe_files(recipe: BaseRecipe) -> dict[str, str]:
    """The texts of a recipe's files, by name. They hold no secrets: a recipe with one is refused."""
    written = recipe.model_dump(mode="json", exclude_unset=True)
    settings = _readable(recipe.model_dump(mode="json")).decode()
    return {RECIPE_FILE: yaml.safe_dump(written, sort_keys=False, allow_unicode=True), SETTINGS_FILE: settings}


def describe(
    folder: Path, recipe: Mapping[str, str], user_files: Mapping[str, str], hardware: dict[str, Any]
) -> dict[str, tuple[Path, str]]:
    """Write the descriptions of a run below ``folder``; returns folder and kind of each by role.

    ``recipe`` has the texts of the recipe's files by name; none outside of runs. ``user_files`` are the paths of the files in
    the stage's key, as :class:`~alignment_core.execution.key.StageKey` has them.
    """
    contents: dict[str, dict[str, bytes]] = {
        RECIPE: {name: text.encode() for name, text in recipe.items()},
        ENVIRONMENT: {ENVIRONMENT_FILE: _readable(environment(hardware))},
        USER_CODE: _source_of(sorted(user_files)),
    }
    described: dict[str, tuple[Path, str]] = {}
    for role, files in contents.items():
        if files:
            described[role] = (folder / role, role)
            (folder / role).mkdir()
            for name, data in files.items():
                (folder / role / name).write_bytes(data)
    return described


def _source_of(paths: list[str]) -> dict[str, bytes]:
    """The user's Python files, numbered, and the table of their paths; secrets in them are cut, since the store is shared. A
    file that is gone by now is left out: the stage is done, and its key has the file's digest."""
    contents: dict[str, str] = {}
    changed = []
    for path in paths:
        with suppress(OSError, UnicodeDecodeError):
            if path.endswith(".py"):
                text = Path(path).read_bytes().decode()
                contents[path] = cut(text)
                changed += [path] if contents[path] != text else []
    if not contents:
        return {}
    names = {path: f"{number:03}.py" for number, path in enumerate(contents)}
    table = {"files": names, "without_secrets": changed}
    return {FILES: _readable(table)} | {names[path]: text.encode() for path, text in contents.items()}


def _readable(content: dict[str, Any]) -> bytes:
    """Canonical content with line breaks, so that equal contents are one artifact."""
    return (json.dumps(json.loads(canonical_json(content)), indent=1, ensure_ascii=False) + "\n").encode()
