"""What becomes of the flags of a command, read from the tables in ``flags/``.

A line of a table has one or several flags before the colon, and after it either a sentence that says why they need no field,
or a list of fields, conversion and note. ``training``, ``data`` and ``loss`` at the beginning of a field are those of the
command's method. After the fields there may be conditions under which the flag has an effect::

    [training.lora.lora_alpha if lora_rank|use_peft, whole]           one of these flags is given
    [rl.critic.clip if advantage_estimator=gae|vtrace, number]        a flag has one of these words
    [rl.rewards unless remote_rm_url, reward_models]                  a flag is not given

and after a single field ``@FLAG``, if it is set only together with that flag. The conversion is a function by name, with its
arguments, or a table of words and their values: a list for several fields, ``""`` to set nothing, ``{refused: …}`` with the
reason. Without a conversion the word is the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from alignment_core.migrate.convert import Converter, Flags, NoCounterpart, Words

FOLDER = Path(__file__).with_name("flags")
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Reads every value as a text: `off`, `none` and `5e-6` are words of a command line. The one in C is ten times as fast."""


@dataclass(frozen=True)
class Rule:
    """A flag that becomes a field, or several that get one value each (of a tuple) or all the same."""

    fields: Mapping[str, str]
    """For each field the flag without which it is not set, or an empty text."""
    conditions: tuple[tuple[str, str], ...]
    """``if`` or ``unless``, and the flags or the words of a flag."""
    convert: Converter
    note: str

    def apply(self, words: Words, flags: Flags) -> list[tuple[str, Any]]:
        """The fields and their values. Raises NoCounterpart."""
        for kind, condition in self.conditions:
            _check(kind, condition, flags)
        try:
            value = self.convert(words, flags)
            values = value if isinstance(value, tuple) else (value,) * len(self.fields)
            pairs = [*zip(self.fields.items(), values, strict=True)]
        except (ValueError, LookupError, ArithmeticError):
            raise NoCounterpart(f"{' '.join(words) or 'nothing'} is no value of it.") from None
        return [
            (field, item) for (field, flag), item in pairs if item is not None and (not flag or flag in flags.given)
        ]


@dataclass(frozen=True)
class Command:
    """One program of a framework."""

    method: str
    rules: Mapping[str, Rule | str]
    """By flag, in the order in which they apply: a list's items before fields of these. A text says why there is no field."""
    defaults: Mapping[str, str | Words]
    """The framework's own defaults, where they decide a result."""
    fixed: Mapping[str, Any]
    """Fields that the command itself stands for."""

    def place(self, field: str) -> str:
        """A field of a table as the command's recipe has it."""
        section = self.method.replace("-", "_")
        data = "prompts" if section == "rl" else "data"
        places = {"data": f"{section}.{data}", "training": f"{section}.training", "loss": f"{section}.loss"}
        head, dot, rest = field.partition(".")
        return f"{places.get(head, head)}{dot}{rest}"


def load(
    framework: str, functions: Mapping[str, Callable[..., Any]]
) -> tuple[dict[str, Command], dict[str, str], dict[str, str]]:
    """The commands of a framework, its programs that are no recipe, and other names of its flags.

    Tables of ``flags/<framework>.yaml`` begin with the lines of the table with the same name in ``shared.yaml``.
    """
    shared, content = _read("shared"), _read(framework)
    tables = {
        name: _rules(shared.get(name, {}), functions) | _rules(content["tables"].get(name, {}), functions)
        for name in {**shared, **content["tables"]}
    }
    commands = {
        name: _command(described, content, tables, functions) for name, described in content["commands"].items()
    }
    return commands, content["elsewhere"], content["names"]


def _read(name: str) -> Any:
    return yaml.load((FOLDER / f"{name}.yaml").read_text(), LOADER)


def _command(described: Any, content: Any, tables: Any, functions: Mapping[str, Callable[..., Any]]) -> Command:
    own = _rules(described.get("flags", {}), functions)
    rules: dict[str, Rule | str] = {}
    for name in described["tables"].split():  # `own` is where the command's own lines come in the order
        rules |= own if name == "own" else tables[name]
    defaults: dict[str, str | Words] = {}
    for name in described["inherits"].split():
        defaults |= content["defaults"][name]
    return Command(described["method"], rules | own, defaults | described["defaults"], described.get("fixed", {}))


def _rules(table: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Rule | str]:
    lines = {
        flags: line if isinstance(line, str) else _rule(*line, functions=functions) for flags, line in table.items()
    }
    return {flag: line for flags, line in lines.items() for flag in flags.split()}


def _rule(target: str, convert: Any = "word", note: str = "", *, functions: Mapping[str, Callable[..., Any]]) -> Rule:
    words = target.split()
    first = next((number for number, word in enumerate(words) if word in ("if", "unless")), len(words))
    fields = {name: flag for name, _, flag in (word.partition("@") for word in words[:first])}
    conditions = (*zip(words[first::2], words[first + 1 :: 2], strict=True),)
    if isinstance(convert, Mapping):
        return Rule(fields, conditions, partial(_chosen, options=convert), note)
    name, *arguments = convert.split()
    function = functions[name]
    return Rule(fields, conditions, lambda words, flags: function(words, flags, *arguments), note)


def _chosen(words: Words, flags: Flags, options: Mapping[str, Any]) -> Any:
    """The value of a word in a table. Raises NoCounterpart."""
    given = words[0].lower() if words else ""
    value = options.get(given)
    refused = {name: item["refused"] for name, item in options.items() if isinstance(item, dict) and "refused" in item}
    if given in refused:
        raise NoCounterpart(refused[given])
    if value is None:
        known = ", ".join(name for name in options if name not in refused)
        raise NoCounterpart(f"{given or 'nothing'} is none of {known}, which have a counterpart.")
    values = (*(None if item == "" else item for item in (value if isinstance(value, list) else [value])),)
    return values if isinstance(value, list) else values[0]


def _check(kind: str, condition: str, flags: Flags) -> None:
    """Raise NoCounterpart, with a sentence, unless a condition holds."""
    names, equals, options = condition.partition("=")
    if equals:
        allowed = options.split("|")
        holds = any(word in allowed for word in flags.words(names))
        reason = f"it belongs to --{names} {' and '.join(allowed)} alone."
    else:
        named = names.split("|")
        holds = any(flags.on(name) for name in named)
        reason = f"it belongs to {' or '.join(f'--{name}' for name in named)}, which is not given."
    if kind == "if" and not holds:
        raise NoCounterpart(reason)
    if kind == "unless" and holds:
        raise NoCounterpart(f"it has no effect with --{condition.replace('=', ' ')}.")
