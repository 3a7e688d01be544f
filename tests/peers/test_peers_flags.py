"""The peers in `align migrate`: every flag of their commands, and the defaults that it writes into recipes."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from trl import DatasetMixtureConfig, DPOConfig, GRPOConfig, KTOConfig, ModelConfig, RewardConfig, RLOOConfig, SFTConfig
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import ScriptArguments

from alignment_core.migrate import openrlhf, trl

CONFIGS: dict[str, tuple[type[Any], type[Any]]] = {
    "sft": (SFTConfig, ScriptArguments),
    "sft --dataset_text_field": (SFTConfig, ScriptArguments),
    "dpo": (DPOConfig, ScriptArguments),
    "reward": (RewardConfig, ScriptArguments),
    "kto": (KTOConfig, ScriptArguments),
    "grpo": (GRPOConfig, GRPOScriptArguments),
    "rloo": (RLOOConfig, GRPOScriptArguments),
}
DECIDES = {"dataset_text_field"}
"""Flags that choose a table and are in the other one."""
NOT_THEIRS = {"wandb_project"}
"""Defaults of ours."""


def newer() -> Path:
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "cli"


def older() -> Path:
    return Path(sys.prefix) / "openrlhf-0.8.11" / "openrlhf" / "cli"


def flags_of(script: Path) -> dict[str, Any]:
    """The flags of a program of OpenRLHF, with their defaults."""
    flags = {}
    for call in ast.walk(ast.parse(script.read_text())):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "add_argument":
            default = next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)
            name = ast.unparse(call.args[0]).removeprefix("f").strip("'\"").removeprefix("--")
            for prefix in ("actor", "critic"):
                flags[name.replace("{prefix}", prefix)] = default or ast.Constant(None)
    return flags


@pytest.mark.parametrize("cli", [older, newer], ids=["0.8.11", "0.11.2"])
def test_every_flag_of_openrlhf_is_in_a_table(cli: Any) -> None:
    programs = [program for program in openrlhf.FRAMEWORK.commands if (cli() / f"{program}.py").exists()]
    assert len(programs) >= 4
    for program in programs:
        rules = openrlhf.FRAMEWORK.commands[program].rules
        unknown = [
            flag for flag in flags_of(cli() / f"{program}.py") if openrlhf.FRAMEWORK.canonical(flag, rules) not in rules
        ]
        assert unknown == [], program


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_trl_is_in_a_table(name: str) -> None:
    configs = (*CONFIGS[name], ModelConfig, DatasetMixtureConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    assert fields - trl.FRAMEWORK.commands[name].rules.keys() <= DECIDES


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_trl(name: str) -> None:
    defaults = {
        field.name: field.default for config in (*CONFIGS[name], ModelConfig) for field in dataclasses.fields(config)
    }
    for flag, words in trl.FRAMEWORK.commands[name].defaults.items():
        theirs = True if flag == "bf16" else defaults[flag]  # unless fp16 is set
        assert values(words) == values(theirs), flag


@pytest.mark.parametrize("program", openrlhf.FRAMEWORK.commands)
def test_defaults_are_those_of_openrlhf(program: str) -> None:
    theirs = flags_of(older() / f"{program.split()[0]}.py")
    for flag, words in openrlhf.FRAMEWORK.commands[program].defaults.items():
        if flag in theirs and flag not in NOT_THEIRS:
            assert values(words) == values(ast.literal_eval(theirs[flag])), flag


def values(words: Any) -> list[Any]:
    """Words, or Python values, as numbers if they are numeric."""
    listed = words.split() if isinstance(words, str) and "{}" not in words else words
    several = listed if isinstance(listed, list | tuple) else [] if listed is None else [listed]
    return [number(element) for element in several]


def number(value: Any) -> Any:
    try:
        return float(value)
    except ValueError:
        return {"true": 1.0, "false": 0.0}.get(value, value)
