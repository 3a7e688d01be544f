"""The flags of a command, and conversions of their words into values of a recipe that OpenRLHF and TRL share.

A conversion takes the words of a flag and all flags of the command. It returns the value of the flag's fields: a tuple for
several fields, None to set nothing. It raises NoCounterpart, or a ValueError or the like for an invalid word.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from alignment_core.recipes.paths import FolderPath, ModelPath, RowsPath, Written, is_written_as_path

Words = Sequence[str]

SECRET = re.compile(r"use_wandb|wandb[._]key|(?:hf|hub|auth|access)_token|^token$|api_key|password|secret")
"""Flags whose words must not appear in the recipe."""

PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of rows that are used without a template."""
KINDS = {"model": ModelPath, "folder": FolderPath}


class NoCounterpart(Exception):
    """This flag, or this value of it, has no counterpart in a recipe; the message is a sentence with the reason."""


@dataclass(frozen=True)
class Flags:
    """The flags of a command, under the names of its table."""

    given: Mapping[str, Words]
    defaults: Mapping[str, str | Words]
    """The framework's defaults of flags that are not given; a text is split into words."""
    processes: int | None
    """Number of processes that the launcher starts; None if it is unknown."""
    folder: Path = field(default_factory=Path.cwd)
    """Folder that paths of the command are relative to."""
    target: Path = field(default_factory=Path.cwd)
    """Folder of the recipe, which its paths are relative to."""
    remarks: list[str] = field(default_factory=list)
    """Sentences for the user, to which conversions add."""

    def words(self, flag: str) -> Words:
        """The words of a flag, or of its default; none if it has neither."""
        default = self.defaults.get(flag, "")
        return self.given.get(flag, default.split() if isinstance(default, str) else default)

    def text(self, flag: str) -> str:
        """The words of a flag as one text."""
        return " ".join(self.words(flag))

    def on(self, flag: str) -> bool:
        """Whether a switch is on."""
        return (flag in self.given or flag in self.defaults) and is_on(self.words(flag))

    @property
    def dataset_name(self) -> str:
        """The data set of TRL's `--dataset_name`; empty if there is none, or if `datasets` replaces it."""
        return "" if self.words("datasets") else self.text("dataset_name")

    def are_files(self, flag: str) -> bool:
        """Whether the rows of a flag are a file or folder, which has no splits."""
        return bool(self.text(flag)) and (self.folder / Path(self.text(flag)).expanduser()).exists()

    def hold_out(self) -> bool:
        """Whether rows are held out for evaluation during training: TRL takes them from a split, OpenRLHF names them."""
        by_split = self.text("eval_strategy") not in ("", "no") and self.dataset_name != ""
        return (by_split and not self.are_files("dataset_name")) or "eval_dataset" in self.given

    def unmet(self, conditions: str) -> str:
        """Why a flag has no effect: the first of the conditions that does not hold, in a sentence; empty if all hold."""
        parts = conditions.split()
        for kind, condition in zip(parts[::2], parts[1::2], strict=True):
            names, equals, words = condition.partition("=")
            choices = (words or names).split("|")
            if condition == "held-out-rows":
                holds = self.hold_out()
                reason = "no rows are held out: see --eval_strategy or --eval_dataset, or set `test_rows` of the data."
            elif equals:
                holds = any(word in choices for word in self.words(names))
                reason = f"it belongs to --{names} {' and '.join(choices)} alone."
            else:
                holds = any(self.on(name) for name in choices)
                reason = f"it belongs to {' or '.join(f'--{name}' for name in choices)}, which is not given."
            if kind == "if" and not holds:
                return reason
            if kind == "unless" and holds:
                return f"it has no effect with --{condition.replace('=', ' ')}."
        return ""

    def remark(self, sentences: Mapping[str, str]) -> None:
        """Add the sentences whose conditions hold."""
        self.remarks.extend(sentence for conditions, sentence in sentences.items() if not self.unmet(conditions))

    def number(self, flag: str, default: float = 0) -> float:
        """The number after a flag. Raises NoCounterpart for another word."""
        text = self.text(flag)
        return number([text], self) if text and text.lower() != "none" else default


Converter = Callable[[Words, Flags], Any]


def is_on(words: Words) -> bool:
    """Whether a switch is on: given alone, or with a word that means so."""
    return not words or words[0].lower() not in ("false", "no", "off", "0", "none")


def word(words: Words, flags: Flags) -> Any:
    """The word itself, which the recipe's field reads; a flag without a word is on."""
    return True if not words else words[0] if len(words) == 1 else [*words]


def words(words: Words, flags: Flags) -> list[str]:
    """All words, as a list."""
    return [*words]


def mapping(words: Words, flags: Flags) -> dict[str, Any] | None:
    """A mapping as the text of a JSON object, or nothing. Raises NoCounterpart for another text."""
    if _is_none(words):
        return None
    try:
        value = json.loads(" ".join(words))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise NoCounterpart(f"{' '.join(words) or 'nothing'} is not a JSON object.")
    return value


def nothing(words: Words, flags: Flags) -> None:
    """Set nothing: the field of another flag contains this one."""


def switch(words: Words, flags: Flags, *values: str) -> Any:
    """A switch, or the value for on and perhaps that for off."""
    on, off = (*values, None)[:2] if values else (True, False)
    return on if is_on(words) else off


def section(words: Words, flags: Flags) -> dict[str, Any] | None:
    """A section with its defaults, if a switch is on."""
    return {} if is_on(words) else None


def chosen(words: Words, flags: Flags, options: Mapping[str, Any]) -> Any:
    """The value of a word in a table. Raises NoCounterpart."""
    given = words[0].lower() if words else ""
    refused = {name: item["refused"] for name, item in options.items() if isinstance(item, dict) and "refused" in item}
    if given in refused:
        raise NoCounterpart(refused[given])
    if given not in options:
        known = ", ".join(name for name in options if name not in refused)
        raise NoCounterpart(f"{given or 'nothing'} is not one of {known}, which have a counterpart.")
    value = options[given]
    values = (*(None if item == "" else item for item in (value if isinstance(value, list) else [value])),)
    return values if isinstance(value, list) else values[0]


def number(words: Words, flags: Flags) -> float:
    """A number. Raises NoCounterpart for another word."""
    try:
        return float(words[0])
    except (IndexError, ValueError):
        raise NoCounterpart(f"{' '.join(words) or 'nothing'} is not a number.") from None


def whole(words: Words, flags: Flags) -> int:
    """A whole number, which may be written as 3.0 or 1e3. Raises NoCounterpart for another."""
    value = number(words, flags)
    if value != int(value):
        raise NoCounterpart(f"{value:g} is not a whole number, which is required here.")
    return int(value)


def whole_or_fraction(words: Words, flags: Flags) -> float:
    """A number, without a fraction if it is whole. Raises NoCounterpart for another word."""
    value = number(words, flags)
    return int(value) if value == int(value) else value


def positive(words: Words, flags: Flags) -> int | None:
    """A whole number above 0; -1, 0 and None stand for no limit."""
    value = whole(words, flags) if not _is_none(words) else 0
    return value if value > 0 else None


def save_steps(words: Words, flags: Flags) -> int | None:
    """Steps between checkpoints that are models. Raises NoCounterpart if training ends before the first one."""
    steps = positive(words, flags)
    if steps is not None and 0 < flags.number("max_steps") <= steps:
        raise NoCounterpart("training ends before the first one, and its last model is an output anyway.")
    return steps


def save_total_limit(words: Words, flags: Flags) -> int | None:
    """The number of such checkpoints. Raises NoCounterpart if there are none."""
    if save_steps(flags.words("save_steps"), flags) is None:
        raise NoCounterpart("--save_steps keeps no checkpoints.")
    return positive(words, flags)


def positive_number(words: Words, flags: Flags) -> float | None:
    """A number above 0; 0 and None switch it off."""
    return None if _is_none(words) else number(words, flags) or None


def numbers(words: Words, flags: Flags) -> list[float]:
    """Several numbers, for one field or one for each."""
    return [number([word], flags) for word in words]


def bounds(words: Words, flags: Flags) -> Any:
    """A lower and an upper bound, or the upper one alone."""
    return numbers(words, flags) if len(words) > 1 else (None, number(words, flags))


def neutral(words: Words, flags: Flags, value: str) -> float:
    """A sampling parameter that has to keep its neutral value in reinforcement learning. Raises NoCounterpart."""
    if words[0].lower() != "none" and number(words, flags) != float(value):
        raise NoCounterpart("samples have to come from the policy itself, so this keeps its neutral value.")
    return float(value)


def column(words: Words, flags: Flags, role: str) -> dict[str, str] | None:
    """The name of a column; nothing is needed if it is named like its role."""
    return None if [*words] in ([role], []) else {role: words[0]}


def path(words: Words, flags: Flags, kind: str) -> str:
    """A path or, in the field of this kind, perhaps a name."""
    return moved(" ".join(words), flags, KINDS[kind])


def source(text: str, flags: Flags, **fields: Any) -> dict[str, Any]:
    """A source of rows, with those of its fields that have a value."""
    return {
        "path": moved(text, flags, RowsPath),
        **{name: item for name, item in fields.items() if item not in (None, "")},
    }


def parts(text: str) -> list[str]:
    """The parts of a text between commas."""
    return [part.strip() for part in text.split(",")]


def product(words: Words, flags: Flags, *factors: str) -> int:
    """The product of several flags, each written with the framework's default as ``flag=1``."""
    values = [flags.number(name, float(default)) for name, _, default in (factor.partition("=") for factor in factors)]
    return int(math.prod(values))


def name(words: Words, flags: Flags) -> str:
    """The name of a run, in the characters that names may have. Raises NoCounterpart if none is left."""
    valid = re.sub(r"[^a-z0-9._-]+", "-", " ".join(words).lower()).strip("-._")
    if not valid:
        raise NoCounterpart("it has none of the letters and digits of names here.")
    return valid


def target_modules(words: Words, flags: Flags) -> Any:
    """Names of layers, or the one name that stands for all."""
    return "all-linear" if [*words] == ["all-linear"] else [*words]


def warmup(words: Words, flags: Flags, per_step: int = 1) -> tuple[float | None, int | None]:
    """Warm-up: below 1 a fraction of all steps, else optimiser steps, of which a step has ``per_step``; none with the schedule
    `constant`. Raises NoCounterpart."""
    value = number(words, flags)
    if "constant" in (flags.text("lr_scheduler"), flags.text("lr_scheduler_type")):
        return 0.0, None
    return (value, None) if value < 1 else (None, math.ceil(int(value) / per_step))


def steps_of_rows(count: float | None, per_step: float, epochs: float, flags: Flags) -> int | None:
    """Steps over ``count`` prompts, or a remark that leaves `rl.steps` to the user if their number is not known."""
    if count is not None:
        return math.ceil(count * epochs / max(per_step, 1))
    flags.remarks.append(
        f"Set `rl.steps` to rows × {epochs:g} ÷ {per_step:g}: the number of prompts is not known here."
    )
    return None


def count_rows(text: str, flags: Flags) -> int | None:
    """The number of rows of a JSON Lines file; None for anything else, or if it does not exist."""
    path = flags.folder / Path(text).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _is_none(words: Words) -> bool:
    return bool(words) and words[0].lower() == "none"


def moved(text: str, flags: Flags, kind: Any) -> str:
    """A path of the command relative to the recipe's folder; a name stays as it is. Raises NoCounterpart for an empty text."""
    if not text:
        raise NoCounterpart("a path or name is needed.")
    resolved = str(TypeAdapter(kind).validate_python(Written(text, flags.folder, flags.folder)))
    if resolved == text or text.startswith("~") or flags.folder.resolve() == flags.target.resolve():
        return text
    relative = os.path.relpath(flags.folder.resolve() / text, flags.target.resolve())
    return f"./{relative}" if is_written_as_path(text) and not is_written_as_path(relative) else relative
