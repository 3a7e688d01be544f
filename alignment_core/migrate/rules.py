"""What becomes of a flag: the three kinds of lines that the tables of both frameworks are made of, and shared converters."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from alignment_core.recipes.paths import CodePath, ModelPath, RowsPath, Written, is_written_as_path

Words = Sequence[str]

SECRET = re.compile(r"use_wandb|wandb[._]key|(?:hf|hub|auth|access)_token|^token$|api_key|password|secret")
"""Flags whose words stay out of the recipe."""

PLAIN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of rows that are to be read as they are."""


class NoCounterpart(Exception):
    """A flag, or this value of it, is nothing that a recipe has; the message says why in a sentence."""


@dataclass(frozen=True)
class Job:
    """A command whose flags have the names of its table."""

    given: Mapping[str, Words]
    defaults: Mapping[str, str | Words]
    """What the framework takes for flags that are not given; a text is split into words."""
    processes: int | None
    """How many of them the launcher starts; None where it does not say."""
    folder: Path = field(default_factory=Path.cwd)
    """Where relative paths of the command begin."""
    target: Path = field(default_factory=Path.cwd)
    """The recipe's own folder, where its paths begin."""
    remarks: list[str] = field(default_factory=list)
    """What the user has to know or do beside, in sentences; converters add to it."""

    def words(self, flag: str) -> Words:
        """The words of a flag, or of its default; none if it is not given."""
        default = self.defaults.get(flag, "")
        return self.given.get(flag, default.split() if isinstance(default, str) else default)

    def text(self, flag: str) -> str:
        """The words of a flag as one text."""
        return " ".join(self.words(flag))

    def on(self, flag: str) -> bool:
        """Whether a switch is on."""
        return (flag in self.given or flag in self.defaults) and is_on(self.words(flag))

    def number(self, flag: str, default: float = 0) -> float:
        """The number after a flag. Raises NoCounterpart if it is none."""
        text = self.text(flag)
        return number([text], self) if text and text.lower() != "none" else default


Converter = Callable[[Words, Job], Any]


def as_is(words: Words, job: Job) -> Any:
    """The word itself, which the recipe's own field reads; a switch without a word is on."""
    return True if not words else words[0] if len(words) == 1 else list(words)


@dataclass(frozen=True)
class To:
    """A flag that is a field, or several that get one value each (of a tuple) or all the same."""

    fields: tuple[str, ...]
    convert: Converter = as_is
    note: str = ""

    def apply(self, words: Words, job: Job) -> list[tuple[str, Any]]:
        """The fields and their values. Raises NoCounterpart."""
        try:
            value = self.convert(words, job)
            values = value if isinstance(value, tuple) else (value,) * len(self.fields)
            return [(name, one) for name, one in zip(self.fields, values, strict=True) if one is not None]
        except (ValueError, LookupError, ArithmeticError):
            raise NoCounterpart(f"{' '.join(words) or 'nothing'} is no value of it.") from None


@dataclass(frozen=True)
class Choice:
    """A flag whose words each stand for fields with values; a text in their place says why a word has no counterpart."""

    options: Mapping[str, Mapping[str, Any] | str]
    note: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """All that it may set."""
        return tuple({name: None for one in self.options.values() if not isinstance(one, str) for name in one})

    def apply(self, words: Words, job: Job) -> list[tuple[str, Any]]:
        """The fields and their values. Raises NoCounterpart."""
        word = str(words[0]).lower() if words else ""
        found = self.options.get(word)
        if found is None:
            known = ", ".join(name for name, one in self.options.items() if not isinstance(one, str))
            raise NoCounterpart(f"{word or 'nothing'} is none of {known}, which have a counterpart.")
        if isinstance(found, str):
            raise NoCounterpart(found)
        return list(found.items())


Rule = To | Choice | str
"""A line of a table; a text is a flag without a counterpart, and says why."""


@dataclass(frozen=True)
class Command:
    """One program of a framework."""

    method: str
    rules: Mapping[str, Rule]
    """In the order in which they apply: what makes a list comes before what sets fields of its items."""
    places: Mapping[str, str] = field(default_factory=dict)
    """What ``{training}`` and the like in fields stand for."""
    defaults: Mapping[str, str | Words] = field(default_factory=dict)
    """The framework's own defaults, where they decide a result."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the command as such stands for."""

    def place(self, name: str) -> str:
        """A field of a table as the command's recipe has it."""
        return name.format(**self.places)


def everywhere(names: str, rule: Rule) -> dict[str, Rule]:
    """Lines for flags that one rule, or one sentence, does for."""
    return dict.fromkeys(names.split(), rule)


# ---------------------------------------------------------------- converters


def is_on(words: Words) -> bool:
    """Whether a switch is on: alone, or with a word that says so."""
    return not words or words[0].lower() not in ("false", "no", "off", "0", "none")


def switch(words: Words, job: Job) -> bool:
    """A switch."""
    return is_on(words)


def number(words: Words, job: Job) -> float:
    """A number. Raises NoCounterpart for another word."""
    try:
        return float(words[0])
    except (IndexError, ValueError):
        raise NoCounterpart(f"{' '.join(words) or 'nothing'} is no number.") from None


def whole(words: Words, job: Job) -> int:
    """A whole number, which may be written as 3.0 or 1e3. Raises NoCounterpart for another."""
    value = number(words, job)
    if value != int(value):
        raise NoCounterpart(
            f"{value:g} is no whole number, which it has to be here; `max_steps` ends training earlier."
        )
    return int(value)


def positive(words: Words, job: Job) -> int | None:
    """A whole number above 0; -1, 0 and None mean that there is none."""
    if words and words[0].lower() == "none":
        return None
    value = whole(words, job)
    return value if value > 0 else None


def above_zero(words: Words, job: Job) -> float | None:
    """A number above 0; 0, or none, means that it is off."""
    if words and words[0].lower() == "none":
        return None
    return number(words, job) or None


def pair(words: Words, job: Job) -> list[float]:
    """Two numbers."""
    return [number([word], job) for word in words[:2]]


def model(words: Words, job: Job) -> str:
    """A model's name or folder."""
    return _moved(as_text(words, job), job, ModelPath)


def code(words: Words, job: Job) -> str:
    """``file.py:name`` or ``module:name``."""
    return _moved(as_text(words, job), job, CodePath)


def rows(text: str, job: Job) -> str:
    """A file or folder of rows, or a data set's name."""
    return _moved(text, job, RowsPath)


def as_text(words: Words, job: Job) -> str:
    """The words as they are."""
    return " ".join(words)


def folder(words: Words, job: Job) -> str:
    """A folder, seen from the recipe's."""
    text = as_text(words, job)
    return text if "://" in text or Path(text).is_absolute() else _relative(text, job)


def only_if(flag: str, convert: Converter, why: str = "", answer: bool = True) -> Converter:
    """A converter for where another flag is given and on (or is not); elsewhere this one has no effect."""

    def guarded(words: Words, job: Job) -> Any:
        if job.on(flag) != answer:
            raise NoCounterpart(why or f"it belongs to --{flag}, which is not given.")
        return convert(words, job)

    return guarded


def unmodified(neutral: float, name: str) -> To:
    """A sampling parameter that reinforcement learning has to leave at its neutral value."""

    def convert(words: Words, job: Job) -> float:
        if words[0].lower() != "none" and number(words, job) != neutral:
            raise NoCounterpart("the policy itself has to be sampled, so this stays at its neutral value.")
        return neutral

    return To((name,), convert)


def column(role: str) -> Converter:
    """A converter of the name of a column; none is needed where the column is called as its role."""

    def convert(words: Words, job: Job) -> dict[str, str] | None:
        return None if list(words) in ([role], []) else {role: words[0]}

    return convert


def always(value: Any) -> Converter:
    """A converter of a flag that says all by being there."""
    return lambda words, job: copy.deepcopy(value)


def if_on(yes: Any, no: Any = None) -> Converter:
    """A converter of a switch into one of two values."""
    return lambda words, job: copy.deepcopy(yes if is_on(words) else no)


nothing = always(None)
"""Of a flag that another one's field already holds."""


def refused(why: str) -> Any:
    """Raise NoCounterpart, in an expression."""
    raise NoCounterpart(why)


def name(words: Words, job: Job) -> str:
    """The name of a run in the letters that names have here. Raises NoCounterpart if nothing is left of it."""
    kept = re.sub(r"[^a-z0-9._-]+", "-", as_text(words, job).lower()).strip("-._")
    if not kept:
        raise NoCounterpart("it has no letter or digit that a name may have here.")
    return kept


def prompt_template(words: Words, job: Job) -> str:
    """A template with ``{}`` for the prompt, in the form that has a name there. Raises NoCounterpart for one without it."""
    text = as_text(words, job).replace("\\n", "\n")
    if "{}" not in text:
        raise NoCounterpart("it has no {}, so OpenRLHF ignores it.")
    before, _, after = text.partition("{}")
    return f"{_braced(before)}{{prompt}}{_braced(after)}"


def steps(count: float, per_step: float, episodes: float) -> int:
    """How many steps so many prompts make."""
    return math.ceil(count * episodes / max(per_step, 1))


def rows_in(text: str, job: Job) -> int | None:
    """The number of rows of a JSON Lines file that is there; None of anything else."""
    path = job.folder / Path(text).expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _braced(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _moved(text: str, job: Job, kind: Any) -> str:
    """A path of the command as the recipe has to write it; a name stays what it is."""
    place = str(TypeAdapter(kind).validate_python(Written(text, job.folder, job.folder)))
    return text if place == text else _relative(text, job)


def _relative(text: str, job: Job) -> str:
    if text.startswith("~") or job.folder.resolve() == job.target.resolve():
        return text
    relative = os.path.relpath(job.folder.resolve() / text, job.target.resolve())
    return f"./{relative}" if is_written_as_path(text) and not is_written_as_path(relative) else relative


def of_section(section: str, data: str = "data") -> dict[str, str]:
    """What the places of a table stand for where a method has one section."""
    return {"data": f"{section}.{data}", "training": f"{section}.training"}
