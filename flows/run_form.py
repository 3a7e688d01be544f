"""The run form of a deployment: the most used fields on top, rarely used ones in boxes of JSON.

Prefect builds a form from the schema of a flow's parameters, with a field for each of hundreds of leaves. Here the sections of
the recipe's method are open; each object in them, and each section that most runs leave alone, is one box with its JSON. Boxes
are validated when the run starts, as ``overrides`` are.
"""

from __future__ import annotations

import copy
from typing import Any

from alignment_core.recipes import BaseRecipe

FIRST = ("name", "seed", "model")
"""Fields above the sections of the method; the other fields of every recipe are below them."""
Schema = dict[str, Any]


def run_form(schema: Schema) -> Schema:
    """The schema of a flow's parameters, rearranged for its form. It accepts more than the flow does, which validates again."""
    form = copy.deepcopy(schema)
    definitions: dict[str, Schema] = form.get("definitions", {})
    names = form["properties"].keys()
    order = ["overrides", *sorted(names - {"overrides", "recipe", "from_stage"}), "recipe", "from_stage"]
    for name, parameter in form["properties"].items():
        parameter["position"] = order.index(name)
    recipe = definitions.get(_named(form["properties"].get("recipe", {})) or "")
    if recipe is None:
        return form  # any recipe, so its sections are not known
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
    """A field of objects as a box of JSON: Prefect shows a field without a type as one."""
    if "$ref" not in str({key: value for key, value in field.items() if key != "default"}):
        return field
    kept: Schema = {key: field[key] for key in ("default", "description") if key in field}
    return {"title": name.replace("_", " ").capitalize(), **kept}


def _is_box(field: Schema) -> bool:
    return not field.keys() & {"type", "anyOf", "allOf", "enum", "const", "$ref"}


def _named(field: Schema) -> str | None:
    """The name of the definition that a field refers to, if it is a reference."""
    (reference,) = [schema["$ref"] for schema in (field, *field.get("allOf", ())) if "$ref" in schema][:1] or [None]
    return str(reference).rpartition("/")[2] if reference else None
