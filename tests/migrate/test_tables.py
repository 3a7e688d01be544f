"""Every name in the tables exists: fields in the recipe classes, commands and methods in the project."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from alignment.flows.cli.main import app
from alignment_core.errors import UserError
from alignment_core.migrate import openrlhf, trl
from alignment_core.migrate.tables import Command
from alignment_core.recipes import reference
from alignment_core.recipes.methods import METHODS

ROOT = Path(__file__).parents[2]
COMMANDS = {**openrlhf.FRAMEWORK.commands, **trl.FRAMEWORK.commands}
SENTENCES = {
    rule
    for command in COMMANDS.values()
    for line in command.rules.values()
    for rule in ([line] if isinstance(line, str) else [line.note])
} | {*openrlhf.FRAMEWORK.elsewhere.values(), *trl.FRAMEWORK.elsewhere.values()}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_field_of_a_table_is_one_of_the_recipe_of_its_method(name: str):
    command: Command = COMMANDS[name]
    recipe = METHODS.load(command.method).recipe
    named = {field for rule in command.rules.values() if not isinstance(rule, str) for field in rule.fields}
    for place in {command.place(field) for field in (*named, *command.fixed)}:
        assert reference.field_at(place)
        assert place.split(".")[0] in recipe.model_fields, place


@pytest.mark.parametrize("name", COMMANDS)
def test_every_default_belongs_to_a_line_of_its_table(name: str):
    command = COMMANDS[name]
    assert [flag for flag in command.defaults if isinstance(command.rules.get(flag, ""), str)] == []


def test_every_dotted_name_stands_for_a_flag_of_some_table():
    known = {flag for command in openrlhf.FRAMEWORK.commands.values() for flag in command.rules}
    assert set(openrlhf.FRAMEWORK.names.values()) <= known


@pytest.mark.parametrize("sentence", sorted(SENTENCES))
def test_commands_pages_and_fields_in_sentences_exist(sentence: str):
    align: Any = typer.main.get_command(app)
    for command in re.findall(r"`align ([a-z-]+(?: [a-z-]+)?)", sentence):
        first, _, second = command.partition(" ")
        assert first in align.commands
        assert not second or second in getattr(align.commands[first], "commands", {second: None}), command
    for page in re.findall(r"docs/[\w/.-]+\.md", sentence):
        assert (ROOT / page).exists()
    for path in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)", sentence):
        try:
            reference.field_at(path)
        except UserError:
            reference.field_at(f"rl.{path}" if not path.startswith("lora") else f"sft.training.{path}")
