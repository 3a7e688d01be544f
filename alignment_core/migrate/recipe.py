"""The recipe of a command, the fields of its flags, and the remaining work."""

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
from alignment_core.migrate.command_line import OPENRLHF, TRL, CommandLine, whole_number
from alignment_core.migrate.convert import SECRET, Flags, NoCounterpart, Words
from alignment_core.migrate.tables import Command
from alignment_core.recipes import parse_recipe, reference, yaml_values
from alignment_core.recipes.paths import BEGINS, with_numbers, written
from alignment_core.recipes.sections.rl import DEPENDENT, RlConfig
from alignment_core.user_code.functions import function_content

FRAMEWORKS = {OPENRLHF: openrlhf.FRAMEWORK, TRL: trl.FRAMEWORK}
LISTS = ("sources", "rewards")
"""Fields that hold a list; a field below them is that of each item."""
FIRST, LAST = ("method", "name", "seed", "model"), ("evaluation", "resources", "tracking")
"""Sections at the beginning and the end of a recipe: the model comes before its training, and resources come last."""


class Mapped(NamedTuple):
    """A flag with a field."""

    flag: str
    field: str
    value: Any
    note: str


class Without(NamedTuple):
    """A flag without a field."""

    flag: str
    why: str


class Unknown(NamedTuple):
    """A flag that is in no table."""

    flag: str
    near: str | None


@dataclass
class Migration:
    """A recipe as plain data, with an account of every word of the command."""

    framework: str
    program: str
    recipe: dict[str, Any]
    flags: Sequence[str]
    """The command's flags with their words, except words that may be secrets."""
    mapped: list[Mapped] = field(default_factory=list)
    without: list[Without] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    defaults: list[Mapped] = field(default_factory=list)
    """Defaults of the framework that differ from the recipe's, for flags that are not given."""
    to_do: list[str] = field(default_factory=list)
    """Sentences about parts without which the recipe does not load, and about other things to check."""
    loads: bool = False
    """Whether the recipe is complete."""

    def reasons(self) -> dict[str, str]:
        """The flags without a field by the sentence that says why."""
        flags: dict[str, list[str]] = {}
        for flag, why in self.without:
            flags.setdefault(why, []).append(flag)
        return {why: ", ".join(names) for why, names in flags.items()}

    def text(self) -> str:
        """The recipe as a file, with the account as comments on top."""
        method = self.recipe["method"]
        head = [f"{method}: the counterpart of {self.program} of {self.framework}, written by `align migrate` from"]
        head += [f"  {line}" for line in _wrapped(f"{self.program} {' '.join(self.flags)}")]
        if self.defaults:
            head.append(f"Settings that it leaves out have {self.framework}'s defaults.")
        head += [line for sentence in self.to_do for line in _wrapped(f"To do: {sentence}", "  ")]
        head += [line for why, flags in self.reasons().items() for line in _wrapped(f"No field: {flags}: {why}", "  ")]
        head += [f"Unknown: {unknown.flag}" for unknown in self.unknown]
        content = yaml.dump(
            self.recipe, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
        )
        return "\n".join(f"# {line}".rstrip() for line in head) + f"\n{content}"


class _Dumper(yaml.SafeDumper):
    """Writes no anchors, which are no help in a recipe."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 112, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def migrate(line: CommandLine, folder: Path, target: Path) -> Migration:
    """The recipe of a command that was written for ``folder``, as a file in the folder ``target``.

    Raises UserError for a program without a recipe.
    """
    framework = FRAMEWORKS[line.framework]
    given = trl.with_file(line.flags, folder) if line.framework == TRL else line.flags
    table = framework.variant(line.program, given)
    if table not in framework.commands:
        raise UserError(f"{table} {framework.elsewhere.get(table, 'is not a known training program')}")
    command = framework.commands[table]
    names = {flag: framework.canonical(flag, command.rules) for flag in given}
    remarks: list[str] = []
    flags = Flags(
        given={names[flag]: words for flag, words in given.items()},
        defaults=framework.defaults(command, given),
        processes=line.processes or whole_number(given, ("num_processes",)),
        folder=folder,
        target=target,
        remarks=remarks,
    )
    flags.remark(command.remarks)
    migration = Migration(
        line.framework,
        f"script {line.script}" if line.script else line.program,
        {"method": command.method, "name": command.method},
        [" ".join((f"--{flag}", *_shown(flag, words))) for flag, words in line.flags.items()],
    )
    if line.processes:
        _put(migration.recipe, "resources.trainers", line.processes)
        migration.mapped.append(Mapped("launcher", "resources.trainers", line.processes, "processes that it starts"))
    spelled = {canonical: f"--{flag}" for flag, canonical in names.items()}
    usual: list[Mapped] = []
    for flag in command.rules:
        if flag in flags.given or flag in flags.defaults:
            _apply(migration, command, flag, spelled.get(flag, f"--{flag}"), flags, usual)
    for default in usual:
        place, value = default.field, default.value
        known = [
            _chosen_default(migration.recipe, place),
            *([reference.default_at(place)] if place in DEPENDENT else []),
        ]
        if not _is_set(migration.recipe, place) and any(value != default for default in known):
            migration.defaults.append(default)
            _put(migration.recipe, place, value)
    for name, value in command.fixed.items():
        _put(migration.recipe, command.place(name), value)
    known = [*command.rules, *(dotted for dotted, name in framework.names.items() if name in command.rules)]
    for flag in (flag for flag, canonical in names.items() if canonical not in command.rules):
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        migration.unknown.append(Unknown(f"--{flag}", f"--{near[0]}" if near else None))
    migration.without += _around(line)
    if unexpanded := {word for words in given.values() for word in words if re.search(r"\$[\w{@(*]", word)}:
        remarks.append(f"The shell would have replaced {', '.join(sorted(unexpanded))}: write the value.")
    migration.recipe = _in_order(migration.recipe)
    migration.to_do = [*_missing(migration, target), *line.notes, *dict.fromkeys(remarks)]
    return migration


def _shown(flag: str, words: Words) -> Words:
    """The words of a flag, except words that may be a secret."""
    if SECRET.search(flag) and words and words[0].lower() not in ("true", "false"):
        return ["…"]
    return [repr(word) if any(letter in word for letter in " \n'\"{}") else word for word in words]


def _apply(migration: Migration, command: Command, flag: str, spelled: str, flags: Flags, usual: list[Mapped]) -> None:
    """Set the fields of a flag, or note why it has none. Of a default of the framework, set fields whose default differs;
    ``usual`` gets those whose default depends on a flag that may come later."""
    rule = command.rules[flag]
    is_given = flag in flags.given
    try:
        if isinstance(rule, str):
            raise NoCounterpart(rule)
        values = rule.apply(flags.words(flag), flags)
    except NoCounterpart as reason:
        if is_given:
            migration.without.append(Without(spelled, str(reason)))
        return
    for name, value in values:
        place = command.place(name)
        value = _typed(place, value)
        if is_given:
            migration.mapped.append(Mapped(spelled, place, value, rule.note))
        elif _depends(place):
            usual.append(Mapped(spelled, place, value, f"{migration.framework}'s default"))
            continue
        elif value == reference.default_at(place) or _lacks_list(migration.recipe, place):
            continue
        else:
            migration.defaults.append(Mapped(spelled, place, value, f"{migration.framework}'s default"))
        _put(migration.recipe, place, value)
    if is_given and not values:
        place = command.place(next(iter(rule.fields), command.method))
        migration.mapped.append(Mapped(spelled, place, None, rule.note or "nothing to set: this is the default"))


def _depends(place: str) -> bool:
    """Whether the default of a field depends on another field of its section or the rewards, or is replaced by a field."""
    above, _, name = place.rpartition(".")
    section = reference.at(above)[0]
    choices = getattr(section, "DEFAULTS_BY", {}).values()
    replaced = name in getattr(section, "ALTERNATIVES", {}).values()
    return replaced or place in DEPENDENT or any(name in of for defaults in choices for of in defaults.values())


def _chosen_default(recipe: Mapping[str, Any], place: str) -> Any:
    """The default of such a field in ``recipe``."""
    above, _, name = place.rpartition(".")
    section: Any = recipe
    for step in above.split("."):
        section = section.get(step) or {}
    chosen = [
        defaults.get(section.get(field), {})
        for field, defaults in reference.at(above)[0].DEFAULTS_BY.items()  # type: ignore[attr-defined]
    ]
    if place in DEPENDENT:
        chosen.append(RlConfig.section_defaults(recipe["rl"]).get(above.removeprefix("rl."), {}))
    return next((fields[name] for fields in chosen if name in fields), reference.default_at(place))


def _is_set(recipe: Mapping[str, Any], place: str) -> bool:
    """Whether a field, or one that replaces it, is set."""
    *above, name = place.split(".")
    node: Any = recipe
    for step in above:
        node = node.get(step, {})
    replaces = getattr(reference.at(".".join(above))[0], "ALTERNATIVES", {})
    return name in {*node, *(replaces.get(field) for field in node)}


def _lacks_list(recipe: Mapping[str, Any], place: str) -> bool:
    """Whether a place is in the items of a list that the recipe does not have."""
    node: Any = recipe
    for step in place.split(".")[:-1]:
        if step in LISTS:
            return not node.get(step)
        node = node.get(step) or {}
    return False


def _put(recipe: dict[str, Any], place: str, value: Any) -> None:
    """Set a field: mappings are merged, lists extended, and fields below a list set in each of its items."""
    *above, last = place.split(".")
    nodes: list[dict[str, Any]] = [recipe]
    for step in above:
        if step in LISTS:
            for node in nodes:
                node[step] = node.get(step) or [{}]
            nodes = [item for node in nodes for item in node[step]]
        else:
            nodes = [node.setdefault(step, {}) for node in nodes]
    for node in nodes:
        if (last == "rows" and node.get("held_out")) or (last == "split" and "split" in node):
            continue  # these fields are for sources of training rows
        old, new = node.get(last), copy.deepcopy(value)
        if isinstance(old, dict) and isinstance(new, dict):
            old.update(new)
        elif isinstance(old, list) and isinstance(new, list) and last in LISTS:
            old.extend(new)
        else:
            node[last] = new


def _typed(place: str, value: Any) -> Any:
    """A word as a value of the recipe's field, such as a number; the loader refuses invalid words."""
    if not isinstance(value, str):
        return value
    adapter: TypeAdapter[Any] = TypeAdapter(reference.field_at(place).annotation)  # type: ignore[arg-type]
    with suppress(ValidationError, yaml.YAMLError):
        plain = with_numbers(yaml_values.load(value))
        adapter.validate_python(plain)
        return plain
    return value


def _in_order(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with its fields in the usual order."""
    if [*recipe.get("model", ())] == ["name"]:
        recipe = {**recipe, "model": recipe["model"]["name"]}
    middle = [name for name in recipe if name not in (*FIRST, *LAST)]
    return {name: recipe[name] for name in (*FIRST, *middle, *LAST) if name in recipe}


def _around(line: CommandLine) -> Iterator[Without]:
    """Notes on the words of a command beside the program and its flags."""
    for name in line.variables:
        yield Without(
            name, "an environment variable: set it before `align run`, too, if it is for the model or the data."
        )
    if line.launcher:  # without the values of its flags, which may be secrets
        flags = [word.partition("=")[0] for word in line.launcher if word.startswith("-")]
        program = itertools.takewhile(lambda word: not word.startswith("-"), line.launcher)
        yield Without(
            " ".join((*program, *flags)),
            "the launcher: `align run` starts its own processes, as `resources` says; RAY_ADDRESS names a Ray cluster.",
        )
    for word in line.stray:
        yield Without(word, "belongs to no flag.")
    for flag in line.repeated:
        yield Without(f"--{flag}", "is given more than once; the last one counts, as in the command.")


def _missing(migration: Migration, target: Path) -> list[str]:
    """The loader's errors about the recipe, in sentences."""
    try:
        recipe = parse_recipe(written(migration.recipe, target), "recipe", refuse_unused=True)
    except UserError as error:
        return [line.replace("recipe: ", "The recipe does not load yet: ", 1) for line in str(error).splitlines()]
    problems = [f"The recipe does not run yet: {problem}" for problem in _missing_functions(recipe)]
    migration.loads = not problems
    return problems


def _missing_functions(recipe: Any) -> Iterator[str]:
    """A sentence for each reward function that does not exist where the recipe names it. No function is loaded."""
    section = getattr(recipe, "rl", None)
    for number, reward in enumerate(section.rewards if section else ()):
        for kind in ("function", "verifier"):
            name = str(getattr(reward, kind, ""))
            try:
                if ":" in name:
                    function_content(name, f"rl.rewards.{number}.{kind}")
            except UserError as error:
                yield str(error).replace(f" ({BEGINS})", "")
