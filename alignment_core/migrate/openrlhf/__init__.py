"""What becomes of OpenRLHF's flags: those of 0.8 to 0.10, and the dotted ones that it has had since 0.11."""

from __future__ import annotations

from collections.abc import Mapping

from alignment_core.migrate.openrlhf.commands import COMMANDS, ELSEWHERE
from alignment_core.migrate.openrlhf.names import canonical, spellings
from alignment_core.migrate.rules import Command, To, Words, is_on

__all__ = ["COMMANDS", "ELSEWHERE", "canonical", "defaults", "spellings", "variant"]


def variant(program: str, flags: Mapping[str, Words]) -> str:
    """The table of a program, which a flag may decide."""
    if program == "batch_inference" and [*flags.get("eval_task", ())] == ["rm"]:
        return "batch_inference --eval_task rm"
    pretrains = any(is_on(flags[flag]) for flag in ("pretrain_mode", "model.pretrain_mode_enable") if flag in flags)
    return f"{program} --pretrain_mode" if program == "train_sft" and pretrains else program


def defaults(command: Command, flags: Mapping[str, Words], remarks: list[str]) -> dict[str, str | Words]:
    """The framework's defaults for a command: the precision is that of the release that its flags show."""
    trains = isinstance(command.rules.get("bf16"), To)
    if trains and any("." in flag for flag in flags):
        return {**command.defaults, "param_dtype": "bf16"}
    if trains and not {"bf16", "param_dtype"} & flags.keys():
        remarks.append(
            f"`{command.place('{training}.bf16')}` is off; OpenRLHF 0.9 and later train in bfloat16 without being told: set it "
            "to true if that is what you ran."
        )
    return dict(command.defaults)
