"""Commands in docs/migrating.md: every recipe exists, with every field that is set."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from alignment.flows.shipped_recipes import file_of
from alignment_core.checks import traps
from alignment_core.recipes import load_recipe
from alignment_core.recipes.methods import METHODS

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"`(align run [^`]+)`", (ROOT / "docs" / "migrating.md").read_text())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_with_its_fields(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traps, "cpu_multiplies_bf16", lambda: True)  # whatever this machine's processor has
    _, _, recipe, *rest = shlex.split(command)
    assert rest[0::2] == ["--set"] * (len(rest) // 2)
    path = file_of(Path(recipe))
    loaded = load_recipe(path, rest[1::2])
    plain = load_recipe(path)
    assert (loaded != plain) == bool(rest), "the override changes the recipe"
    assert traps.warnings(loaded) == []


def test_every_kind_of_training_has_a_command() -> None:
    shown = {load_recipe(file_of(Path(shlex.split(command)[2]))).method for command in COMMANDS}
    assert set(METHODS.names()) - shown <= {"nightly", "comparison", "sweep"}, "which the others have nothing like"
