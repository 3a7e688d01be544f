"""Recipes that compare methods: shared fields, refused fields of branches, and errors with their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.recipes import parse_recipe
from tests.recipes.contents import refusal

EVALUATION = {"prompts": "held-out.jsonl", "verifier": "math"}
DPO = {"method": "dpo", "dpo": {"data": "pairs.jsonl", "loss": {"beta": 0.3}}}
ROUNDS = {"prompts": "p.jsonl", "selection": {"score": "verifier", "min_score": 1}}
BEST = {"method": "rejection-sampling", "evaluation": "ours", "rejection_sampling": ROUNDS}
MINIMAL: dict[str, Any] = {
    "method": "comparison",
    "name": "demo",
    "seed": 3,
    "model": "m",
    "sft": {"data": "rows.jsonl"},
    "branches": {"dpo": DPO, "best": BEST},
    "evaluation": EVALUATION,
}


def test_a_branch_is_a_recipe_of_its_method_with_the_comparisons_start() -> None:
    recipe: Any = parse_recipe(MINIMAL)
    assert list(recipe.recipes) == ["dpo", "best"]
    dpo = recipe.recipes["dpo"]
    assert (dpo.method, dpo.name, dpo.seed, dpo.model, dpo.sft) == ("dpo", "demo-dpo", 3, recipe.model, recipe.sft)
    assert dpo.dpo.loss.beta == 0.3
    assert dpo.evaluation is None
    assert recipe.recipes["best"].evaluation == recipe.evaluation
    assert recipe.final == "dpo"
    assert parse_recipe({**MINIMAL, "result": "best"}).final == "best"  # type: ignore[attr-defined]


def test_a_stored_recipe_is_the_same_from_any_folder(load: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    recipe = load(MINIMAL)
    kept = recipe.model_dump(mode="json")
    assert kept["branches"]["dpo"]["dpo"]["data"]["sources"][0]["path"] == str(tmp_path / "pairs.jsonl")
    assert kept["branches"]["best"]["evaluation"] == "ours"
    monkeypatch.chdir("/")
    again: Any = parse_recipe(kept)
    assert again.model_dump(mode="json") == kept
    assert again.recipes == recipe.recipes


def test_branches_of_a_comparison_without_sft_have_starts_of_their_own(load: Any) -> None:
    own = {"sft": {"data": "other.jsonl"}}
    preferences = {"method": "comparison", **own, "branches": {"dpo": DPO}, "evaluation": EVALUATION}
    recipe = load({**MINIMAL, "sft": None, "branches": {"best": {**BEST, **own}, "preferences": preferences}})
    best, inner = recipe.recipes["best"], recipe.recipes["preferences"]
    assert best.sft == inner.sft == inner.recipes["dpo"].sft
    assert (inner.recipes["dpo"].name, inner.recipes["dpo"].seed) == ("demo-preferences-dpo", 3)
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"branches": {}}, "branches: "),
        ({"branches": {"sft": DPO}}, "`branches`: 'sft' cannot name a branch: use small letters"),
        ({"branches": {"a/b": DPO}}, "`branches`: 'a/b' cannot name a branch"),
        ({"branches": {"dpo": {**DPO, "model": "n"}}}, "`branches.dpo.model` belongs to the comparison"),
        ({"branches": {"dpo": {**DPO, "sft": {"data": "x"}}}}, "`branches.dpo.sft` belongs to the comparison"),
        ({"branches": {"dpo": {"dpo": DPO["dpo"]}}}, "branches.dpo: method: is missing; choose one of"),
        ({"branches": {"dpo": {**DPO, "method": "dop"}}}, "branches.dpo: method: is 'dop'"),
        ({"branches": {"dpo": {**DPO, "dpo": {"data": "x", "lr": 1}}}}, "branches.dpo: dpo.lr: unknown field"),
        ({"branches": {"dpo": {**DPO, "reward_model": "ours"}}}, "`branches.dpo.reward_model` is `ours`, but the comp"),
        ({"branches": {"n": {"method": "nightly"}}}, "'nightly' cannot be a branch: it is more than one graph"),
        ({"branches": {"c": {"method": "comparison", "branches": {"dpo": DPO}}}}, "branches.c: evaluation: "),
        (
            {"branches": {"c": {"method": "comparison", "branches": {"sft": DPO}, "evaluation": EVALUATION}}},
            "`branches`: 'sft' cannot name a branch",
        ),
        ({"branches": {"e": {"method": "evaluate"}}}, "'evaluate' cannot start from `sft`"),
        ({"result": "kto"}, "`result`: there is no branch 'kto'; choose one of best, dpo"),
        ({"evaluation": None}, "evaluation: "),
        (
            {"reward_model": {"model": "judge"}, "evaluation": {**EVALUATION, "rewards": [{"verifier": "math"}]}},
            "nothing uses `reward_model`",
        ),
    ],
)
def test_inconsistent_fields_are_refused_in_a_sentence(load: Any, fields: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(load, {**MINIMAL, **fields})
