"""What becomes of TRL's flags: those of `trl sft|dpo|reward|kto|grpo|rloo`, which are fields of its configurations (1.16)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alignment_core.errors import UserError
from alignment_core.migrate.rules import Command, Rule, Words, is_on
from alignment_core.migrate.trl.commands import COMMANDS, ELSEWHERE

__all__ = ["COMMANDS", "ELSEWHERE", "canonical", "defaults", "spellings", "variant", "with_file"]

REMARK = (
    "TRL puts only rows of messages into the chat template; here rows of plain text get it, too, if the tokenizer has one: set "
    "`chat_template` of the data to leave them as they are (docs/tutorials/from-trl.md)."
)
OF_MESSAGES = (
    "Of rows of `messages` TRL trains on every token; here on the assistant's turns, as with --assistant_only_loss."
)


def variant(program: str, flags: Mapping[str, Words]) -> str:
    """The table of a program, which a flag may decide."""
    return "sft --dataset_text_field" if program == "sft" and "dataset_text_field" in flags else program


def canonical(flag: str, rules: Mapping[str, Rule]) -> str:
    """The name by which a table knows a flag; itself if it knows none."""
    return flag


def spellings(rules: Mapping[str, Rule]) -> Sequence[str]:
    """Every name that a user may mean, for hints."""
    return list(rules)


def defaults(command: Command, flags: Mapping[str, Words], remarks: list[str]) -> dict[str, str | Words]:
    """TRL's defaults for a command."""
    remarks.append(REMARK)
    if command.method == "sft" and not is_on(flags.get("assistant_only_loss", ["false"])):
        remarks.append(OF_MESSAGES)
    half = is_on(flags["fp16"]) if "fp16" in flags else False
    return {key: value for key, value in command.defaults.items() if key != "bf16" or not half}


def with_file(flags: Mapping[str, Words], folder: Path) -> dict[str, Words]:
    """The flags with those of the file that `--config` names, and with `--no_x` as `--x false`. Raises UserError."""
    said: dict[str, Words] = {}
    if words := flags.get("config"):
        path = folder / words[0]
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise UserError(f"--config {words[0]}: cannot be read as YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise UserError(f"--config {words[0]}: a mapping of flags is needed")
        said = {str(key): _as_words(value) for key, value in content.items() if value is not None}
    for flag, words in flags.items():
        positive_form = flag.removeprefix("no_")
        if flag != "config":
            said[positive_form] = ["false"] if positive_form != flag else words
    return said


def _as_words(value: Any) -> list[str]:
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return [yaml.safe_dump(value)]
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
