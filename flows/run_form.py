"""The run form of a deployment: what a user changes first on top, and what is rare in boxes of JSON.

Prefect makes a form of the schema of a flow's parameters, with a field for each of hundreds of leaves. Here a recipe's own
section is open, and each object in it, like the sections that most runs leave alone, is one box that holds its JSON. What
is in a box is checked when the run starts, as ``overrides`` are.
"""

from __future__ import annotations

import copy
from typing import Any

from alignment_core.recipes import BaseRecipe

FIRST = ("name", "seed", "model")
"""Of a recipe's fields those above the sections of its method; the other fields of every recipe are below them."""
Schema = dict[str, Any]


def run_form(schema: Schema) -> Schema:
    """The schema of a flow's parameters as its form should show it. What it accepts, the old one accepts or the flow checks."""
    form = copy.deepcopy(schema)
    definitions: dict[str, Schema] = form.get("definitions", {})
    names = form["properties"].keys()
    order = ["overrides", *sorted(names - {"overrides", "recipe", "from_stage"}), "recipe", "from_stage"]
    for name, parameter in form["properties"].items():
        parameter["position"] = order.index(name)
    recipe = definitions.get(_named(form["properties"].get("recipe", {})) or "")
    if recipe is None:
        return form  # one of several recipes, of which the form cannot know the sections
    fields: dict[str, Schema] = recipe["properties"]
    for name, field in fields.items():
        section = definitions.get(_named(field) or "")
        if section is not None and name in recipe.get("required", ()) and name not in BaseRecipe.model_fields:
            section["properties"] = _arranged(
                {inner: _boxed(inner, one) for inner, one in section["properties"].items()}
            )
    own = [name for name in fields if name not in BaseRecipe.model_fields]
    others = [name for name in fields if name in BaseRecipe.model_fields and name not in FIRST]
    fields_in_order = [*FIRST, *sorted(own, key=lambda name: name not in recipe.get("required", ())), *others]
    open_sections = {name for name in own if name in recipe.get("required", ())}
    recipe["properties"] = {
        name: {**(fields[name] if name in open_sections else _boxed(name, fields[name])), "position": position}
        for position, name in enumerate(fields_in_order)
    }
    return form


def _arranged(fields: dict[str, Schema]) -> dict[str, Schema]:
    """Plain values first, then the boxes."""
    order = sorted(fields, key=lambda name: _is_box(fields[name]))
    return {name: {**fields[name], "position": position} for position, name in enumerate(order)}


def _boxed(name: str, field: Schema) -> Schema:
    """A field whose value is an object or a list of them as a box of JSON, which is what no type means to the form."""
    if "$ref" not in str({key: value for key, value in field.items() if key != "default"}):
        return field
    kept: Schema = {key: field[key] for key in ("default", "description") if key in field}
    return {"title": name.replace("_", " ").capitalize(), **kept}


def _is_box(field: Schema) -> bool:
    return not field.keys() & {"type", "anyOf", "allOf", "enum", "const", "$ref"}


def _named(field: Schema) -> str | None:
    """The definition that a field is, if it is one and nothing else."""
    (reference,) = [one["$ref"] for one in (field, *field.get("allOf", ())) if "$ref" in one][:1] or [None]
    return str(reference).rpartition("/")[2] if reference else None
