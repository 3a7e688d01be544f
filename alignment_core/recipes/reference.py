"""The reference of all fields of all recipes, made of the configuration objects themselves."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from typing import Any, NoReturn

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from alignment_core.errors import UserError
from alignment_core.recipes import methods
from alignment_core.recipes.base import Config, NameOf
from alignment_core.recipes.recipe import BaseRecipe
from alignment_core.recipes.sections.data import DataConfig, DataSource

MARKDOWN_HEAD = """# All fields

Made by `align fields --markdown > docs/fields.md` from the recipes themselves; [recipes.md](recipes.md) explains how they play
together. `align fields sft.data` shows one section in the terminal.

A path such as `sft.training.learning_rate` is also what `--set` takes. Where a default is a section, only what differs from
that section's own defaults is shown.
"""


class Field(BaseModel):
    """One field as people read it."""

    name: str
    type: str
    default: str | None
    """As YAML would have it; none for a field that must be given."""
    description: str
    section: str | None = None
    """Name of the configuration object that it holds, if it is a section."""


def fields_of(config: type[BaseModel], defaults: Any = None) -> list[Field]:
    """The fields of a configuration object, in its order; ``defaults`` is the object that stands where it is left out."""
    found = []
    for name, info in config.model_fields.items():
        inner = section_of(info.annotation)
        default = None if info.is_required() else _default(info)
        if isinstance(defaults, config):
            default = _written(getattr(defaults, name))
        description = " ".join((info.description or "").split())
        section = inner.__name__ if inner else None
        found.append(Field(name=name, type=_type(info), default=default, description=description, section=section))
    return found


def at(path: str) -> tuple[type[BaseModel], list[Field]]:
    """The configuration object at a dotted ``path`` with its fields, or the object that has the one field ``path`` names.

    Fields that a shorthand lets people write one level higher are among them. Raises UserError with near names.
    """
    steps = [step for step in path.split(".") if not step.isdigit()] if path else []
    if not steps:
        return BaseRecipe, fields_of(BaseRecipe)
    config: type[BaseModel] = BaseRecipe
    found: list[Field] = []
    roots: list[tuple[type[BaseModel], Any]] = [(one.recipe, None) for one in methods.loaded()[0]]
    for number, step in enumerate(steps):
        owner, defaults = next((root for root in roots if step in _known(root[0])), (None, None))
        if owner is None:
            known = sorted({name for root, _ in roots for name in _known(root)})
            _refuse(path, step, ".".join(steps[:number]), known)
        info = _known(owner)[step]
        inner = section_of(info.annotation)
        if inner is None:
            if steps[number + 1 :]:
                raise UserError(f"{path}: `{step}` is not a section, so it has no fields")
            return owner, [one for one in _all_fields(owner, defaults) if one.name == step]
        given = getattr(defaults, step, None) if isinstance(defaults, BaseModel) else info.default
        roots = [(inner, given)]
        config, found = inner, _all_fields(inner, given)
    return config, found


def _all_fields(config: type[BaseModel], defaults: Any) -> list[Field]:
    found = [field for one in (config, *_shorthands(config)) for field in fields_of(one, defaults)]
    return list({field.name: field for field in found}.values())


def _known(config: type[BaseModel]) -> dict[str, FieldInfo]:
    return {name: info for one in (config, *_shorthands(config)) for name, info in one.model_fields.items()}


def _shorthands(config: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    return (DataSource,) if config is DataConfig else _alternatives(config)


def _alternatives(config: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    return config.alternatives() if issubclass(config, Config) else ()


def _refuse(path: str, step: str, above: str, known: list[str]) -> NoReturn:
    near = difflib.get_close_matches(step, known, n=3, cutoff=0.5)
    where = f"in `{above}`" if above else "in a recipe"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"{path}: there is no {step!r} {where}; {hint}")


def sections() -> dict[type[BaseModel], list[str]]:
    """Every configuration object below the recipes, with the paths at which recipes have it."""
    found: dict[type[BaseModel], list[str]] = {}
    for one in methods.loaded()[0]:
        for config, path in _below(one.recipe, ""):
            paths = found.setdefault(config, [])
            if path not in paths:
                paths.append(path)
    return found


def _below(config: type[BaseModel], path: str) -> Iterator[tuple[type[BaseModel], str]]:
    for name, info in config.model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None:
            below = f"{path}.{name}" if path else name
            for one in (inner, *_alternatives(inner)):
                yield one, below
                yield from _below(one, below)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The configuration object that a field holds, alone, in a list or beside others."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in typing.get_args(annotation) if (found := section_of(one))), None)


def markdown() -> str:
    """The reference as a page."""
    parts = [MARKDOWN_HEAD]
    parts.append("## Every recipe\n\n" + "\n".join(_table(fields_of(BaseRecipe))))
    for method in methods.loaded()[0]:
        recipe = method.recipe
        own = [field for field in fields_of(recipe) if field not in fields_of(BaseRecipe) and field.name != "method"]
        parts.append(f"## method: {method.name}\n\n{_summary(recipe)}\n\n" + "\n".join(_table(own)))
    for config, paths in sections().items():
        listed = ", ".join(f"`{path}`" for path in paths)
        parts.append(
            f"## {config.__name__}\n\n{_summary(config)}\n\nAt {listed}.\n\n" + "\n".join(_table(_own_fields(config)))
        )
    return "\n\n".join(parts) + "\n"


def _own_fields(config: type[BaseModel]) -> list[Field]:
    """Without those that it shares with all that may be in its place."""
    bases = (base for base in config.__mro__[1:] if issubclass(base, Config) and config in base.alternatives())
    shared = {name for base in bases for name in base.model_fields}
    return [field for field in fields_of(config) if field.name not in shared]


def _summary(config: type[BaseModel]) -> str:
    return " ".join((config.__doc__ or "").replace("``", "`").split())


def _table(fields: list[Field]) -> Iterator[str]:
    yield "| field | type | default | |\n|---|---|---|---|"
    for field in fields:
        type_ = f"[{field.type}](#{field.section.lower()})" if field.section else _cell(field.type)
        default = "**required**" if field.default is None else f"`{_escaped(field.default)}`"
        yield f"| `{field.name}` | {type_} | {default} | {_escaped(field.description)} |"


def _cell(text: str) -> str:
    return _escaped(text).replace("<", "&lt;")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


# ---------------------------------------------------------------- types and defaults as people write them

_NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "mapping", Any: "anything"}


def _type(info: FieldInfo) -> str:
    bounds = [text for one in info.metadata if (text := _bound(one))]
    choices = next((one.choices() for one in info.metadata if isinstance(one, NameOf)), None)
    named = " or ".join(f'"{one}"' for one in choices) if choices else _named(info.annotation)
    return f"{named} {' and '.join(bounds)}" if bounds else named


def _named(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _named(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' if isinstance(value, str) else _written(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_named(one) for one in arguments if one is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_named(arguments[0])}"
        return f"[{', '.join(_named(one) for one in arguments)}]"
    if origin is dict:
        return f"mapping of {_named(arguments[0])} to {_named(arguments[1])}"
    return _NAMES.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _bound(one: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return next((f"{sign} {getattr(one, name)}" for name, sign in signs.items() if hasattr(one, name)), "")


def _default(info: FieldInfo) -> str:
    return _written(info.get_default(call_default_factory=True))


def _required(config: type[BaseModel]) -> bool:
    return any(info.is_required() for info in config.model_fields.values())


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(_written(one) for one in value)}]"
    if isinstance(value, BaseModel):
        plain = {} if _required(type(value)) else type(value)().model_dump()
        changed = {name: one for name, one in value.model_dump().items() if name not in plain or plain[name] != one}
        return "{" + ", ".join(f"{name}: {_written(one)}" for name, one in changed.items()) + "}"
    return str(value)
