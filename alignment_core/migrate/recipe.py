"""The recipe of a command, what became of each of its flags, and what is left to do."""

from __future__ import annotations

import copy
import difflib
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from alignment_core.errors import UserError
from alignment_core.migrate import openrlhf, trl
from alignment_core.migrate.command_line import OPENRLHF, CommandLine
from alignment_core.migrate.rules import SECRET, Command, Job, NoCounterpart, Words
from alignment_core.recipes import parse_recipe, reference
from alignment_core.recipes.load import value_of
from alignment_core.recipes.paths import BEGINS, with_numbers, written
from alignment_core.user_code.functions import function_content

LISTS = ("sources", "rewards")
"""Fields that hold a list; a field below them is that of each item."""


class Mapped(NamedTuple):
    """A flag that is a field."""

    flag: str
    field: str
    value: Any
    note: str


class Without(NamedTuple):
    """A flag that is none."""

    flag: str
    why: str


class Unknown(NamedTuple):
    """A flag that no table has."""

    flag: str
    near: str | None


@dataclass
class Migration:
    """A recipe as plain data, and an account of every word of the command."""

    framework: str
    program: str
    recipe: dict[str, Any]
    mapped: list[Mapped] = field(default_factory=list)
    without: list[Without] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    defaults: list[Mapped] = field(default_factory=list)
    """What the command does not say and the framework does, where the recipe would do something else."""
    to_do: list[str] = field(default_factory=list)
    """What is missing before the recipe loads, and what else to look at, in sentences."""
    loads: bool = False
    """Whether the recipe is complete."""
    said: Sequence[str] = ()
    """The command's flags with their words, without those that may be secrets."""

    def reasons(self) -> dict[str, str]:
        """The flags without a field, together where one sentence says why."""
        flags: dict[str, list[str]] = {}
        for one in self.without:
            flags.setdefault(one.why, []).append(one.flag)
        return {why: ", ".join(names) for why, names in flags.items()}

    def text(self) -> str:
        """The recipe as a file, with what is worth knowing on top."""
        said = [
            f"{self.recipe['method']}: what the {self.program} does with {self.framework}, written by `align migrate` from"
        ]
        said += [f"  {line}" for line in _wrapped(f"{self.program} {' '.join(self.said)}")]
        if self.defaults:
            said.append(f"What it does not say is as {self.framework} has it by default.")
        said += [line for one in self.to_do for line in _bullet("To do", one)]
        said += [line for why, flags in self.reasons().items() for line in _bullet("No field", f"{flags}: {why}")]
        said += [line for one in self.unknown for line in _bullet("Unknown", one.flag)]
        content = yaml.dump(
            self.recipe,
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=None,
            width=120,
            allow_unicode=True,
        )
        return "\n".join(f"# {line}".rstrip() for line in said) + f"\n{content}"


class _Dumper(yaml.SafeDumper):
    """Without anchors, which a recipe has no use for."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def migrate(line: CommandLine, folder: Path, target: Path) -> Migration:
    """The recipe of a command that was written for ``folder``, as a file in the folder ``target`` has to have it.

    Raises UserError for a program that is no recipe here.
    """
    framework = openrlhf if line.framework == OPENRLHF else trl
    flags = line.flags if framework is openrlhf else trl.with_file(line.flags, folder)
    table = framework.variant(line.program, flags)
    if table not in framework.COMMANDS:
        raise UserError(f"{table} {framework.ELSEWHERE.get(table, 'is no training that is known here')}")
    command = framework.COMMANDS[table]
    names = {flag: framework.canonical(flag, command.rules) for flag in flags}
    given = {names[flag]: words for flag, words in flags.items()}
    remarks: list[str] = []
    defaults = framework.defaults(command, flags, remarks)
    job = Job(given, defaults, line.processes or _processes(given), folder, target, remarks)
    program = f"script {line.script}" if line.script else line.program
    made = Migration(line.framework, program, {"method": command.method, "name": command.method})
    made.said = [" ".join((f"--{flag}", *_shown(flag, words))) for flag, words in line.flags.items()]
    if line.processes:
        _put(made.recipe, "resources.trainers", line.processes)
        made.mapped.append(Mapped("launcher", "resources.trainers", line.processes, "processes that it starts"))
    _fill(made, command, job, {canonical: flag for flag, canonical in names.items()})
    for flag, canonical in names.items():
        if canonical not in command.rules:
            near = difflib.get_close_matches(flag, framework.spellings(command.rules), n=1, cutoff=0.6)
            made.unknown.append(Unknown(f"--{flag}", f"--{near[0]}" if near else None))
    made.without += _around(line)
    left = {word for words in flags.values() for word in words if re.search(r"\$[\w{@(*]", word)}
    if left:
        remarks.append(f"The shell would have replaced {', '.join(sorted(left))}: write what it stands for.")
    made.recipe = _in_order(made.recipe)
    made.to_do = [*_missing(made, target), *line.notes, *dict.fromkeys(job.remarks)]
    return made


def _processes(given: Mapping[str, Words]) -> int | None:
    """The number of processes where it stands among the program's own flags, as TRL has it."""
    words = given.get("num_processes") or ()
    return int(words[0]) if words and words[0].isdigit() else None


def _fill(made: Migration, command: Command, job: Job, spelled: Mapping[str, str]) -> None:
    """Apply the rules of a command, in their order."""
    for flag, rule in command.rules.items():
        if flag not in job.given:
            if flag in job.defaults and not isinstance(rule, str):
                _default(made, command, flag, job)
            continue
        said = f"--{spelled[flag]}"
        if isinstance(rule, str):
            made.without.append(Without(said, rule))
            continue
        try:
            found = rule.apply(job.words(flag), job)
        except NoCounterpart as why:
            made.without.append(Without(said, str(why)))
            continue
        for name, value in found:
            place = command.place(name)
            value = _typed(place, value)
            _put(made.recipe, place, value)
            made.mapped.append(Mapped(said, place, value, rule.note))
        if not found:
            nothing = command.place(rule.fields[0]) if rule.fields else command.method
            made.mapped.append(Mapped(said, nothing, None, rule.note or "nothing to set: it is so by default"))
    for name, value in command.fixed.items():
        _put(made.recipe, command.place(name), value)


def _default(made: Migration, command: Command, flag: str, job: Job) -> None:
    """What the framework does where a flag is not given, if the recipe would do something else."""
    rule = command.rules[flag]
    assert not isinstance(rule, str)
    with suppress(NoCounterpart):
        for name, value in rule.apply(job.words(flag), job):
            place = command.place(name)
            value = _typed(place, value)
            if value != _our_default(place) and not _lacks_list(made.recipe, place):
                _put(made.recipe, place, value)
                made.defaults.append(Mapped(f"--{flag}", place, value, f"{made.framework}'s default"))


def _lacks_list(recipe: Mapping[str, Any], place: str) -> bool:
    """Whether a place is in the items of a list that there is not."""
    node: Any = recipe
    for step in place.split(".")[:-1]:
        if step in LISTS and not node.get(step):
            return True
        node = {} if step in LISTS else node.get(step) or {}
    return False


def _put(recipe: dict[str, Any], place: str, value: Any) -> None:
    """Set a field: mappings are merged, lists made longer, and what is below a list set in each of its items."""
    *above, last = place.split(".")
    nodes: list[dict[str, Any]] = [recipe]
    for step in above:
        if step in LISTS:
            nodes = [item for node in nodes for item in (node.setdefault(step, []) or _one_of(node[step]))]
        else:
            nodes = [node.setdefault(step, {}) for node in nodes]
    for node in nodes:
        if last == "rows" and node.get("held_out"):
            continue
        if last == "split" and "split" in node:
            continue
        old, new = node.get(last), copy.deepcopy(value)
        if isinstance(old, dict) and isinstance(new, dict):
            old.update(new)
        elif isinstance(old, list) and isinstance(new, list) and last in LISTS:
            old.extend(new)
        else:
            node[last] = new


def _one_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items.append({})
    return items


def _typed(place: str, value: Any) -> Any:
    """A word as the recipe's own field has it: a number where it takes one. The loader judges what is none."""
    if not isinstance(value, str):
        return value
    adapter: TypeAdapter[Any] = TypeAdapter(reference.field_at(place).annotation)  # type: ignore[arg-type]
    with suppress(ValidationError, yaml.YAMLError):
        read = with_numbers(value_of(value))
        adapter.validate_python(read)
        return read
    return value


def _in_order(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe as people write it: the model before what is done to it, and where it runs at the end."""
    first, last = ("method", "name", "seed", "model"), ("evaluation", "resources", "tracking")
    if [*recipe.get("model", ())] == ["name"]:
        recipe = {**recipe, "model": recipe["model"]["name"]}
    middle = [name for name in recipe if name not in (*first, *last)]
    return {name: recipe[name] for name in (*first, *middle, *last) if name in recipe}


def _our_default(place: str) -> Any:
    info = reference.field_at(place)
    return None if info.is_required() else info.get_default(call_default_factory=True)


def _around(line: CommandLine) -> Iterator[Without]:
    """What stands beside the program and its flags."""
    for name in line.variables:
        yield Without(
            name, "an environment variable: set it before `align run`, too, if it is for the model or the data."
        )
    if line.launcher:  # without the values of its flags, which may be secrets
        shown = [word.partition("=")[0] for word in line.launcher if word.startswith("-")]
        program = [*itertools.takewhile(lambda word: not word.startswith("-"), line.launcher)]
        yield Without(
            " ".join((*program, *shown)),
            "the launcher: `align run` starts its processes itself, as `resources` says; RAY_ADDRESS names a Ray cluster.",
        )
    for word in line.stray:
        yield Without(word, "belongs to no flag.")
    for flag in line.repeated:
        yield Without(f"--{flag}", "is given more than once; the last one counts, as in the command.")


def _missing(made: Migration, target: Path) -> list[str]:
    """What the loader finds wrong with the recipe, in sentences."""
    try:
        recipe = parse_recipe(written(made.recipe, target), "recipe", refuse_unused=True)
    except UserError as error:
        return [line.replace("recipe: ", "The recipe does not load yet: ", 1) for line in str(error).splitlines()]
    problems = [f"The recipe does not run yet: {problem}" for problem in _not_there(recipe)]
    made.loads = not problems
    return problems


def _not_there(recipe: Any) -> Iterator[str]:
    """A sentence for each reward function that does not exist where the recipe names it; none is loaded."""
    section = getattr(recipe, "rl", None)
    named = [
        (f"rl.rewards.{number}.{field}", str(getattr(reward, field, "")))
        for number, reward in enumerate(section.rewards if section else ())
        for field in ("function", "verifier")
    ]
    for place, name in named:
        if ":" not in name:
            continue
        try:
            function_content(name, place)
        except UserError as error:
            yield str(error).replace(f" ({BEGINS})", "")


def _bullet(head: str, text: str) -> list[str]:
    return _wrapped(f"{head}: {text}", "  ")


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 112, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _shown(flag: str, words: Words) -> Words:
    """The words of a flag, without those that may be a secret."""
    if SECRET.search(flag) and words and words[0].lower() not in ("true", "false"):
        return ["…"]
    return [_quoted(word) for word in words]


def _quoted(word: str) -> str:
    return repr(word) if any(letter in word for letter in " \n'\"{}") else word
