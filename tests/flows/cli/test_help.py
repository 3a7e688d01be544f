"""`align --help` groups the commands, and every command and option has a help text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from alignment.flows.cli.main import PANELS, app
from tests.align import align_here

GROUP: Any = typer.main.get_command(app)


def commands(group: Any, path: str = "align") -> Iterator[tuple[str, Any]]:
    """All commands below a group, with their names as a user types them."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}")


def test_help_shows_the_panels_in_order_of_use(tmp_path: Path) -> None:
    lines = align_here(tmp_path, "--help").stdout.splitlines()
    titles = [line.split()[1] for line in lines if line.startswith("╭─") and "Options" not in line]
    assert titles == ["Start", "Run", "Look", "Serve", "Operate"] == list(PANELS)
    first_words = [line.split()[1] for line in lines if line.startswith("│ ")]
    for before, after in [
        ("doctor", "init"),
        ("init", "run"),
        ("run", "samples"),
        ("samples", "serve"),
        ("serve", "up"),
    ]:
        assert first_words.index(before) < first_words.index(after)


def test_every_command_is_in_exactly_one_panel() -> None:
    listed = [command for panel in PANELS.values() for command in panel]
    assert len(listed) == len(set(map(id, listed))) == len(GROUP.commands) == 34


@pytest.mark.parametrize(
    ("path", "command"), list(commands(GROUP)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_and_option_has_a_help_text(path: str, command: Any) -> None:
    assert command.help
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert [option.name for option in options if not option.help] == []
    assert options or getattr(command, "commands", None), path
