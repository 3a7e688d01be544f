"""Load recipes from YAML and ``--set`` overrides; each mistake is a sentence with the field and the fix."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, ValidationInfo

from alignment_core.credentials import refuse_literals
from alignment_core.errors import UserError
from alignment_core.recipes import methods, yaml_values
from alignment_core.recipes.base import REFUSE_UNUSED, TRUTH_FOR_NUMBER, Config, refuses_unused, section_of
from alignment_core.recipes.paths import written
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.reference import known_fields

_DESCRIPTOR = re.compile(r"/dev/(stdin|fd/\d+)|/proc/[^/]+/fd/\d+")
"""A path that stands for an open file descriptor."""


def load_recipe(
    path: Path, overrides: Iterable[str] = (), working_folder: Path | None = None, sweeps: Sequence[str] = ()
) -> BaseRecipe:
    """Read the recipe in the YAML file ``path`` and apply ``overrides`` such as ``iterative_dpo.rounds=3``.

    With ``sweeps`` such as ``dpo.loss.beta=0.05,0.1`` the result is a sweep over that recipe.

    Paths in the file are relative to its folder, those in ``overrides`` to ``working_folder`` (default: this process's).
    Raises UserError with one line per mistake.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.y*ml")], n=1, cutoff=0.4)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise UserError(f"{path}: no such recipe file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from None
    try:
        content = yaml_values.load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        location = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        reason = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{location}: not valid YAML: {reason}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a recipe is a mapping of fields, this is {_kind(content)}")
    here = working_folder or Path.cwd()
    content = written(content, folder_of(path), here)
    content = apply_overrides(content, overrides, here)
    if sweeps:
        content = {"method": "sweep", "base": content, "sweep": _values(sweeps, here)}
    return parse_recipe(content, origin=str(path), refuse_unused=True)


def folder_of(path: Path) -> Path:
    """The folder of relative paths in the recipe at ``path``."""
    absolute = path.absolute()
    piped = _DESCRIPTOR.fullmatch(str(absolute)) or not stat.S_ISREG(absolute.stat().st_mode)
    return Path.cwd() if piped else absolute.parent.resolve()  # a piped recipe has no folder of its own


def parse_recipe(content: dict[str, Any], origin: str = "recipe", refuse_unused: bool = False) -> BaseRecipe:
    """Validate plain data as a recipe of its ``method``. Raises UserError with one line per mistake. Literal secrets are
    refused first, so that no other message quotes them.

    Relative paths stay relative, except in texts that are :class:`~alignment_core.recipes.paths.Written`. ``refuse_unused``
    refuses fields without effect, for recipes that users write; in stored recipes they are ignored.
    """
    refuse_literals(content, origin)
    name = content.get("method")
    if not isinstance(name, str) or name not in methods.METHODS.names():
        raise UserError(f"{origin}: method: {_no_method(name)}")
    model = methods.method(name).recipe
    try:
        return model.model_validate(content, context=REFUSE_UNUSED if refuse_unused else None)
    except ValidationError as error:
        lines = [_sentence(model, item) for item in _causes(error)]
        raise UserError("\n".join(f"{origin}: {line}" for line in dict.fromkeys(lines))) from None


def parse_part(content: dict[str, Any], where: str, info: ValidationInfo) -> BaseRecipe:
    """A recipe inside another one, which is being validated. Raises ValueError with one line per mistake."""
    try:
        return parse_recipe(content, where, refuse_unused=refuses_unused(info.context))
    except UserError as error:
        raise ValueError(str(error)) from None


def _no_method(name: Any) -> str:
    known = methods.METHODS.names()
    names = {alias: method.name for method in methods.loaded()[0] for alias in (method.name, *method.aliases)}
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = (
        f"; did you mean {names[near[0]]!r}?"
        if near
        else "; a plug-in that provides it must be installed"
        if name
        else ""
    )
    problem = "is missing" if name is None else f"is {name!r}"
    return f"{problem}; choose one of {', '.join(known)}{hint}"


def apply_overrides(content: dict[str, Any], overrides: Iterable[str], folder: Path | None = None) -> dict[str, Any]:
    """A copy of ``content`` in which each ``path=value`` is set; values are read as YAML, numbers index lists.

    Paths in the values are relative to ``folder``, by default the working folder.
    """
    folder = folder or Path.cwd()
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator or not path.strip():
            raise UserError(f"--set {override}: write it as path=value, such as sft.training.learning_rate=1e-4")
        try:
            value = yaml_values.load(text)
        except yaml.YAMLError as error:
            raise UserError(f"--set {override}: the value is not valid YAML{_twice(error)}; quote it") from None
        content = _with(content, path.strip().split("."), written(value, folder, folder), f"--set {override}")
    return content


def set_field(content: dict[str, Any], path: str, value: Any, option: str) -> dict[str, Any]:
    """A copy of ``content`` in which ``path`` is set. Raises UserError, beginning with ``option``, for an impossible path."""
    changed: dict[str, Any] = _with(content, path.split("."), value, option)
    return changed


def _with(node: Any, steps: list[str], value: Any, option: str, owner: type[BaseModel] | None = None) -> Any:
    """``node`` with ``value`` at the end of the path ``steps``. Parts beside the path are shared, not copied.

    ``owner`` is the section that ``node`` is the content of, if that is known: a renamed field that ``node`` has by its other
    name is replaced.
    """
    step, rest = steps[0], steps[1:]
    if isinstance(node, list):
        if not step.isdigit() or int(step) >= len(node):
            raise UserError(f"{option}: {step!r} is not an index of a list with {len(node)} items")
        index = int(step)
        return [
            *node[:index],
            _with(node[index], rest, value, option, owner) if rest else value,
            *node[index + 1 :],
        ]
    if node is not None and not isinstance(node, dict):
        raise UserError(f"{option}: there is nothing inside {node!r}, so {step!r} cannot be set")
    node = node or {}
    if node.get("method") in methods.METHODS.names():
        owner = methods.method(node["method"]).recipe
    renamed = owner.RENAMED if owner and issubclass(owner, Config) else {}
    name = renamed.get(step, step)
    names = {name, *(old for old, new in renamed.items() if new == name)}
    if rest:
        before = next((node[name] for name in (step, *names) if name in node), None)
        field = known_fields(owner).get(name) if owner else None
        value = _with(before, rest, value, option, section_of(field.annotation) if field else None)
    return {**{name: item for name, item in node.items() if name not in names - {step}}, step: value}


def _values(sweeps: Iterable[str], folder: Path) -> dict[str, list[Any]]:
    """The values of each field in texts such as ``dpo.loss.beta=0.05,0.1``; paths in them are relative to ``folder``."""
    fields: dict[str, list[Any]] = {}
    for sweep in sweeps:
        path, separator, text = (part.strip() for part in sweep.partition("="))
        if not (path and separator and text):
            raise UserError(f"--sweep {sweep}: write it as path=value,value, such as dpo.loss.beta=0.05,0.1,0.3")
        if path in fields:
            raise UserError(f"--sweep {sweep}: {path} is given twice; name all its values at once")
        try:
            values = yaml_values.load(f"[{text}]")
        except yaml.YAMLError as error:
            raise UserError(f"--sweep {sweep}: the values are not valid YAML{_twice(error)}; quote them") from None
        fields[path] = [written(value, folder, folder) for value in values]
    return fields


def _twice(error: yaml.YAMLError) -> str:
    """The field that occurs twice, if that is the error."""
    problem = str(getattr(error, "problem", ""))
    return f": {problem}" if problem.endswith("occurs twice") else ""


def _causes(error: ValidationError) -> list[Any]:
    """The mistakes, without "too short" for a list that is too short only because its items are invalid."""
    items = error.errors(include_url=False)
    inside = {item["loc"][: len(item["loc"]) - cut] for item in items for cut in range(1, len(item["loc"]))}
    return [item for item in items if not (item["type"] == "too_short" and item["loc"] in inside)]


def _sentence(model: type[BaseModel], item: Any) -> str:
    path = [str(step) for step in item["loc"]]
    where = ".".join(path) or "recipe"
    if item["type"] == "extra_forbidden":
        known = _fields_at(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
        return f"{where}: unknown field; " + (
            f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"
        )
    if item["type"] == TRUTH_FOR_NUMBER:
        where = ".".join([*path, item["ctx"]["field"]])
        return f"{where}: a number is needed (YAML reads yes, no, on and off as truth values)"
    if item["type"] == "missing":
        return f"{where}: is missing and has no default"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}"
    return f"{where}: {message[0].lower()}{message[1:]}; got {item['input']!r}"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the configuration object that ``path`` leads to, starting at ``model``."""
    for step in path:
        if step.isdigit():
            continue
        field = model.model_fields.get(step)
        inner = section_of(field.annotation) if field else None
        if inner is None:
            return []
        model = inner
    return list(known_fields(model))


def _kind(value: Any) -> str:
    names = {type(None): "empty", list: "a list", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")
