"""The form in which a run of a deployment is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow

from alignment.flows import deployment_flows as flows
from alignment.flows.deployments import flow_of, form_of
from alignment.flows.run_form import run_form
from alignment.flows.shipped_recipes import shipped
from alignment_core.recipes import parse_recipe
from alignment_core.recipes.methods import METHODS

ROOT = Path(__file__).parents[2]


def shown(schema: dict[str, Any], field: dict[str, Any], path: str = "") -> list[str]:
    """Paths of the fields that the form shows of ``field``, in their order."""
    reference = next((option["$ref"] for option in (field, *field.get("allOf", ())) if "$ref" in option), "")
    inner = schema["definitions"].get(reference.rpartition("/")[2], {}).get("properties")
    if not inner:
        return [path]
    ordered = sorted(inner.items(), key=lambda item: item[1].get("position", 0))
    return [leaf for key, child in ordered for leaf in shown(schema, child, f"{path}.{key}")]


def deployed(name: str) -> Flow[..., Any]:
    flow: Flow[..., Any] = getattr(flows, shipped()[name].function)
    return flow


@pytest.mark.parametrize("method", METHODS.names())
def test_the_form_is_short_with_overrides_on_top(method: str) -> None:
    form = run_form(flow_of(method).parameters.model_dump())
    leaves = shown({"definitions": {**form["definitions"], "all": form}}, {"$ref": "/all"})
    assert leaves[0] == ".overrides"
    assert leaves[-1] == ".from_stage"
    assert len(leaves) < 50, leaves
    recipe = [leaf for leaf in leaves if leaf.startswith(".recipe")]
    assert recipe[:3] == [".recipe.name", ".recipe.seed", ".recipe.model"]
    assert recipe[-3:] == [".recipe.resources", ".recipe.retention", ".recipe.tracking"]


def test_the_form_has_plain_fields_first_and_objects_as_boxes_with_defaults() -> None:
    form = run_form(deployed("iterative-dpo").parameters.model_dump())
    section = form["definitions"]["IterativeDpoConfig"]["properties"]
    assert section["rounds"]["type"] == "integer"
    assert section["rounds"]["description"] == "Number of rounds."
    assert section["rounds"]["position"] < section["training"]["position"]
    assert "$ref" not in str(section["training"])
    assert form["properties"]["recipe"]["default"]["iterative_dpo"]["training"]["batch_size"] > 0


def test_shipped_defaults_and_handwritten_yaml_pass_the_form() -> None:
    from jsonschema import Draft202012Validator

    for name in [*shipped(), "iterative-dpo"]:
        form = form_of(deployed(name))
        validator = Draft202012Validator(form)
        default = form["properties"]["recipe"]["default"]
        assert list(validator.iter_errors({"recipe": default, "overrides": ["seed=3"]})) == []
    shorthand = {**default, "model": "some/model", "evaluation": None, "sft": {"data": "rows.jsonl"}}
    assert [error.message for error in validator.iter_errors({"recipe": {**shorthand, "seed": "x"}})] == [
        "'x' is not of type 'integer'"
    ]


def test_a_deployed_run_makes_the_form_of_its_own_flow_alone() -> None:
    code = (
        "from alignment.flows import deployment_flows as deployed\n"
        "from prefect import Flow\n"
        "deployed.deployed_sft\n"
        "print([name for name, value in vars(deployed).items() if isinstance(value, Flow)])"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "['deployed_sft']"


def test_only_shipped_recipes_and_methods_are_flows() -> None:
    assert all(isinstance(deployed(name), Flow) for name in shipped())
    with pytest.raises(AttributeError, match="has no attribute 'deployed_nothing'"):
        getattr(flows, "deployed_nothing")  # noqa: B009


@pytest.mark.parametrize("name", shipped())
def test_the_form_shows_only_written_fields_and_parses_to_the_same_recipe(name: str) -> None:
    every_field = run_form(deployed(name).parameters.model_dump())["properties"]["recipe"]["default"]
    written = form_of(deployed(name))["properties"]["recipe"]["default"]
    assert parse_recipe(written) == parse_recipe(every_field)
    sizes = [
        len(str({name: value for name, value in shown.items() if name != "branches"}))
        for shown in (written, every_field)
    ]
    assert sizes[0] < sizes[1] / 2, "branches are kept as they are written"
