"""Every command of OpenRLHF and TRL that docs/migrating.md has in its first table becomes a recipe of the method beside it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alignment.flows.shipped_recipes import file_of
from alignment_core.migrate import Migration
from alignment_core.recipes import load_recipe

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "migrating.md").read_text().split("## Fields")[0]
SEVERAL = ("in a shell loop", "by hand", "csft_prompt")
"""Cells with more than one command."""
NEEDS = {
    "sft": "--pretrain acme/base --dataset rows.jsonl",
    "ppo_ray": "--pretrain acme/base --prompt_data rows.jsonl --reward_pretrain acme/judge --n_samples_per_prompt 4",
    "batch_inference": "--pretrain acme/base --dataset rows.jsonl",
    "kd": "--pretrain acme/base --dataset rows.jsonl --teacher_model acme/teacher",
    "trl": "--model_name_or_path acme/base --dataset_name acme/rows",
}
"""Arguments that commands in the table omit: a model and rows."""


def whole(cell: str) -> str | None:
    """The command of a cell of the table, with the required arguments."""
    quoted = re.findall(r"`([^`]+)`", cell)
    if not quoted or any(words in cell for words in SEVERAL):
        return None
    command = quoted[0].removeprefix("openrlhf.cli.")
    if command.startswith("trl "):
        text = " --dataset_text_field text" if "column `text`" in cell else ""
        rewards = " --reward_funcs rewards.right" if re.match(r"trl (grpo|rloo)", command) else ""
        return f"{command} {NEEDS['trl']}{text}{rewards}"
    if command.startswith("--"):
        value = " agent.py" if command == "--agent_func_path" else ""
        command = f"train_ppo_ray {command}{value}"
    program = command.split()[0].removeprefix("train_")
    if not re.fullmatch(r"train_\w+|batch_inference", command.split()[0]):
        return None
    return f"python -m openrlhf.cli.{command} {NEEDS.get(program, NEEDS['sft'])}"


def commands() -> Iterator[tuple[str, str]]:
    for line in TABLE.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and "align run" in cells[2]:
            recipe = shlex.split(re.findall(r"`([^`]+)`", cells[2])[0])[2]
            yield from ((command, recipe) for cell in cells[:2] if (command := whole(cell)))


COMMANDS = list(commands())


def test_most_rows_of_the_table_are_commands():
    assert len(COMMANDS) > 25
    assert {line.split()[2].rpartition(".")[2] for line, _ in COMMANDS if "openrlhf" in line} == {
        *(
            "train_sft",
            "train_rm",
            "train_prm",
            "train_dpo",
            "train_kto",
            "train_kd",
            "batch_inference",
            "train_ppo_ray",
        )
    }
    assert {line.split()[1] for line, _ in COMMANDS if line.startswith("trl")} == {
        *("sft", "dpo", "reward", "kto", "grpo", "rloo")
    }


@pytest.mark.parametrize(("command", "recipe"), COMMANDS)
def test_a_documented_command_becomes_a_recipe_of_the_documented_method(
    command: str, recipe: str, migrated: Callable[[str], Migration], tmp_path: Path
):
    (tmp_path / "rewards.py").write_text("def right(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    migration = migrated(command)
    assert migration.loads, migration.to_do
    assert migration.unknown == []
    file = tmp_path / "recipe.yaml"
    file.write_text(migration.text())
    assert load_recipe(file).method == load_recipe(file_of(Path(recipe))).method
