"""Recipes of continued pre-training: refused fields, and compositions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import open_store
from alignment_core.composition.graph import composing
from alignment_core.execution.key import key_of
from alignment_core.recipes import parse_recipe
from alignment_core.recipes.methods import decides, method_of
from alignment_core.stages.dataset import DatasetConfig
from tests.flows.test_compositions import EVALUATION, MODEL, Composed
from tests.recipes.contents import refusal
from tests.stages.calls import call

SECTION = "continued_pretraining"
CPT: dict[str, Any] = {
    "method": "continued-pretraining",
    "name": "demo",
    "model": "some/model",
    SECTION: {"data": "rows.jsonl"},
}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            f"{SECTION}.block_overlap=512",
            "`block_overlap` is 512, but must be less than half of `data.max_length`, which is 1024",
        ),
        (
            f"{SECTION}.data={{path: a, overlong: truncate}}",
            "`overlong` has no effect on documents: long ones are cut into blocks",
        ),
        (
            f"{SECTION}.data={{path: a, max_prompt_length: 9}}",
            "`max_prompt_length` has no effect on documents: long ones are cut into blocks",
        ),
        (f"{SECTION}.data={{path: a, chat_template: plain}}", "`chat_template` has no effect on documents"),
        (f"{SECTION}.block_overlp=1", "did you mean 'block_overlap'?"),
    ],
)
def test_inconsistent_fields_are_refused_by_name(load: Any, override: str, sentence: str) -> None:
    message = refusal(load, CPT, override)
    assert sentence in message
    assert f"recipe.yaml: {SECTION}" in message


def test_the_smallest_block_has_room_for_a_token(load: Any) -> None:
    assert load(CPT, f"{SECTION}.data={{path: a, max_length: 2}}")
    assert load(CPT, f"{SECTION}.data={{path: a, max_length: 3}}", f"{SECTION}.block_overlap=1")


def test_the_policy_is_trained_on_documents_and_evaluated_beside_the_start(tmp_path: Path) -> None:
    run = Composed(open_store(tmp_path / "store"))
    section = {"data": {"task": "first", "rows": 9}, "block_overlap": 3}
    recipe = parse_recipe({**CPT, "model": MODEL, "evaluation": EVALUATION, SECTION: section})
    with composing(run):
        outputs = method_of(recipe).compose(recipe)
    label = "continued-pretraining"
    assert run.roles(label) == {"model": "model", "data": f"{label}/data"}
    assert (run.configs[f"{label}/data"].kind, run.configs[f"{label}/data"].settings) == (
        "documents",
        {"block_overlap": 3},
    )
    assert run.roles("evaluation/overlap") == {"held_out": "evaluation/prompts", f"{label}/data": f"{label}/data"}
    assert (outputs.final, outputs.baseline) == (label, "start")


def test_the_field_that_decides_a_stage_is_named() -> None:
    label = "continued-pretraining"
    assert decides(f"{label}/data", "settings.block_overlap") == f"{SECTION}.block_overlap"
    assert decides(f"{label}/data", "data.max_length") == f"{SECTION}.data.max_length"
    assert decides(label, "training.learning_rate") == f"{SECTION}.training.learning_rate"


def test_settings_of_a_kind_are_in_the_key_and_do_not_change_other_keys() -> None:
    data = {"data": {"sources": [{"task": "first"}]}, "sources": [], "kind": "demonstrations"}
    assert "settings" not in DatasetConfig.model_validate(data).model_dump(mode="json")
    assert set(DatasetConfig.model_validate(data).content()) == {"data", "sources", "kind"}
    keys = [
        key_of(call(stage="dataset", config={**data, "kind": "documents", "settings": settings}, inputs={})).value
        for settings in ({}, {"block_overlap": 1}, {"block_overlap": 2})
    ]
    assert len(set(keys)) == 3
