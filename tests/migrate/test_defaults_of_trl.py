"""TRL's own defaults, as its configurations have them: giving a default explicitly changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignment_core.migrate import migrate, read
from alignment_core.recipes import parse_recipe

trl = pytest.importorskip("trl")
COMMON = "--model_name_or_path acme/base --dataset_name acme/rows --num_processes 1"
RL = "--reward_model_name_or_path acme/judge --max_steps 9"
COMMANDS = {
    "sft": ("SFTConfig", ""),
    "dpo": ("DPOConfig", ""),
    "reward": ("RewardConfig", ""),
    "kto": ("KTOConfig", ""),
    "grpo": ("GRPOConfig", RL),
    "rloo": ("RLOOConfig", RL),
}
CHANGE_NO_RESULT = {"vllm_gpu_memory_utilization", "model_revision", "seed", "save_steps"}
"""Memory, the Hub's own default, another seed, and the models of earlier steps, which are kept only if they are asked for: a
run resumes without them."""
NOT_ALONE = {"max_steps", "output_dir", "dataset_text_field"}
"""Flags that the command already has, or that choose another table."""


def defaults(*configs: Any) -> Iterator[tuple[str, str]]:
    """Flags with their default as on a command line."""
    for field in (field for config in configs for field in dataclasses.fields(config)):
        value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        value = getattr(value, "value", value)
        words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        is_plain = isinstance(value, bool | int | float | str | list)
        if is_plain and words and field.name not in CHANGE_NO_RESULT | NOT_ALONE:
            yield field.name, words


@pytest.mark.parametrize("command", COMMANDS)
def test_the_recipe_has_the_defaults_of_trl(command: str, tmp_path: Path) -> None:
    config, more = COMMANDS[command]

    def recipe(flags: str) -> Any:
        migration = migrate(read(f"trl {command} {COMMON} {more} {flags}"), tmp_path, tmp_path)
        return parse_recipe(migration.recipe).model_dump(mode="json")

    without_flags = recipe("")
    flags = [*defaults(getattr(trl, config), trl.ModelConfig, trl.ScriptArguments)]
    assert len(flags) > 50
    assert [f"--{flag} {words}" for flag, words in flags if recipe(f"--{flag} {words}") != without_flags] == []
