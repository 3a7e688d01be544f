"""The fields of a command's flags, read from the tables in ``flags/``.

A line of a table has one or several flags before the colon, and after it either a sentence that says why they need no field,
or a list of fields, conversion, note and remark. ``training``, ``data`` and ``loss`` at the beginning of a field are sections
of the command's method. After the fields there may be conditions under which the flag has an effect::

    [training.lora.lora_alpha if lora_rank|use_peft, whole]           one of these flags is given
    [rl.critic.value_clip if advantage_estimator=gae|vtrace, number]        a flag has one of these words
    [rl.rewards unless remote_rm_url, reward_models]                  a flag is not given
    [training.eval_steps if held-out-rows, positive]                  rows are held out

and after a single field ``@FLAG``, if it is set only together with that flag. The conversion is a function by name, with its
arguments, or a table of words and their values: a list for several fields, ``""`` to set nothing, ``{refused: …}`` with the
reason. Without a conversion the word is the value; with ``nothing`` the flag sets no field, because the conversion of another
flag reads it. A remark is a sentence for the user if the flag sets a field, by its conditions.

``tables`` of a command are applied in their order; ``own`` among them stands for the command's own ``flags``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from alignment_core.migrate.convert import Converter, Flags, NoCounterpart, Words, chosen, is_on

FOLDER = Path(__file__).with_name("flags")
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Reads every value as a text: `off`, `none` and `5e-6` are words of a command line. The loader in C is ten times as fast."""
CONDITIONS = re.compile(r"(?: (?:if|unless) \S+)*$")
"""At the end of the fields of a line."""


@dataclass(frozen=True)
class Rule:
    """A flag that sets a field, or several: each to its own value of a tuple or list, or all to one value."""

    fields: Mapping[str, str]
    """For each field the flag without which it is not set, or an empty text."""
    conditions: str
    convert: Converter
    note: str
    remarks: Mapping[str, str]
    """Sentences by their conditions."""

    def apply(self, words: Words, flags: Flags) -> list[tuple[str, Any]]:
        """The fields and their values. Raises NoCounterpart."""
        if reason := flags.unmet(self.conditions):
            raise NoCounterpart(reason)
        try:
            value = self.convert(words, flags)
            are_several = isinstance(value, tuple) or (isinstance(value, list) and len(self.fields) > 1)
            values = value if are_several else (value,) * len(self.fields)
            pairs = [*zip(self.fields.items(), values, strict=True)]
        except (ValueError, LookupError, ArithmeticError):
            raise NoCounterpart(f"{' '.join(words) or 'nothing'} is not a valid value.") from None
        fields = [
            (field, item) for (field, flag), item in pairs if item is not None and (not flag or flag in flags.given)
        ]
        if fields:
            flags.remark(self.remarks)
        return fields


@dataclass(frozen=True)
class Command:
    """One program of a framework."""

    method: str
    rules: Mapping[str, Rule | str]
    """By flag, in the order in which they apply: a list's items before fields of these. A text says why there is no field."""
    defaults: Mapping[str, str | Words]
    """The framework's own defaults, where they decide a result."""
    fixed: Mapping[str, Any]
    """Fields that follow from the command itself."""
    remarks: Mapping[str, str]
    """Differences in every recipe of the command, by conditions."""

    def place(self, field: str) -> str:
        """The place of a table's field in the command's recipe."""
        section = self.method.replace("-", "_")
        data = "prompts" if section == "rl" else "data"
        places = {"data": f"{section}.{data}", "training": f"{section}.training", "loss": f"{section}.loss"}
        head, dot, inner = field.partition(".")
        return f"{places.get(head, head)}{dot}{inner}"


@dataclass(frozen=True)
class Framework:
    """The commands of OpenRLHF or TRL."""

    commands: Mapping[str, Command]
    """By program; a name such as ``sft --dataset_text_field`` is the program with this flag."""
    elsewhere: Mapping[str, str]
    """Programs without a recipe, and their counterparts here."""
    names: Mapping[str, str]
    """Other names of flags."""
    dotted: Mapping[str, str]
    """Defaults of releases in which flags have dots, where these differ."""

    def canonical(self, flag: str, rules: Mapping[str, Any]) -> str:
        """The name of a flag in a table; the flag itself if the table has none."""
        groups = flag.removesuffix("_enable").split(".")
        of_policy = ".".join(groups[1:] if groups[0] == "actor" else groups)
        tries = (flag, self.names.get(flag), self.names.get(of_policy), of_policy, "_".join(groups[-2:]))
        last = () if groups[0] == "critic" else (groups[-1],)
        return next((name for name in (*tries, *last) if name in rules), flag)

    def variant(self, program: str, given: Mapping[str, Words]) -> str:
        """The table of a program, which one of its flags may decide."""
        if program not in self.commands:
            return program
        rules = self.commands[program].rules
        by_name = {self.canonical(flag, rules): words for flag, words in given.items()}
        for name in (*self.commands, *self.elsewhere):
            of, _, deciding = name.partition(" --")
            flag, _, word = deciding.partition(" ")
            if of == program and flag in by_name and (word in by_name[flag] if word else is_on(by_name[flag])):
                return name
        return program

    def defaults(self, command: Command, given: Mapping[str, Words]) -> dict[str, str | Words]:
        """The defaults of the release to which the flags belong."""
        return {**command.defaults, **(self.dotted if any("." in flag for flag in given) else {})}


def load(framework: str, functions: Mapping[str, Callable[..., Any]]) -> Framework:
    """The tables of a framework.

    Tables of ``flags/<framework>.yaml`` begin with the lines of the table with the same name in ``shared.yaml``.
    """
    shared, content = (yaml.load((FOLDER / f"{name}.yaml").read_text(), LOADER) for name in ("shared", framework))
    tables = {
        name: _rules({**shared.get(name, {}), **content["tables"].get(name, {})}, functions)
        for name in {**shared, **content["tables"]}
    }
    commands = {name: _command(lines, content, tables, functions) for name, lines in content["commands"].items()}
    return Framework(commands, content["elsewhere"], content.get("names", {}), content.get("dotted", {}))


def _command(lines: Any, content: Any, tables: Any, functions: Mapping[str, Callable[..., Any]]) -> Command:
    own = _rules(lines.get("flags", {}), functions)
    rules: dict[str, Rule | str] = {}
    for name in lines["tables"].split():
        rules |= own if name == "own" else tables[name]
    defaults, remarks = (
        {flag: item for group in lines["inherits"].split() for flag, item in content[key].get(group, {}).items()}
        for key in ("defaults", "remarks")
    )
    return Command(
        lines["method"],
        rules | own,
        defaults | lines["defaults"],
        lines.get("fixed", {}),
        remarks | lines.get("remarks", {}),
    )


def _rules(table: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> dict[str, Rule | str]:
    rules = {flags: line if isinstance(line, str) else _rule(functions, *line) for flags, line in table.items()}
    return {flag: rule for flags, rule in rules.items() for flag in flags.split()}


def _rule(
    functions: Mapping[str, Callable[..., Any]],
    target: str,
    conversion: Any = "word",
    note: str = "",
    remarks: Mapping[str, str] | None = None,
) -> Rule:
    conditions = CONDITIONS.search(target)[0]  # type: ignore[index]
    fields = {name: flag for name, _, flag in (word.partition("@") for word in CONDITIONS.sub("", target).split())}
    if isinstance(conversion, Mapping):
        return Rule(fields, conditions, partial(chosen, options=conversion), note, remarks or {})
    name, *arguments = conversion.split()
    function = functions[name]
    return Rule(fields, conditions, lambda words, flags: function(words, flags, *arguments), note, remarks or {})
