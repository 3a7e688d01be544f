"""Weights that were trained beside 4 or 8 bits and are rounded to as many again: which plans are warned about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.checks import requantization
from alignment_core.recipes import parse_recipe
from tests.checks.recipes import MODEL, look, rl, sft

SCORED = [{"urls": ["http://127.0.0.1:9/score"]}]


def training(bits: int | None) -> dict[str, Any]:
    return {"lora": {} if bits is None else {f"load_in_{bits}bit": True}}


def warned(store: Store, recipe: dict[str, Any]) -> list[str]:
    return [*requantization.warnings(store, plan(parse_recipe(recipe), store).stages)]


@pytest.mark.parametrize(
    ("first", "second", "warns"),
    [(4, 4, True), (8, 8, True), (4, 8, False), (8, 4, False), (None, 4, False), (4, None, False), (None, None, False)],
)
def test_a_second_stage_in_as_many_bits_is_warned_about(
    first: int | None, second: int | None, warns: bool, store: Store, rows: Path
) -> None:
    data = {"path": str(rows)}
    recipe: dict[str, Any] = {"method": "dpo", "name": "demo", "model": MODEL}
    recipe |= {"sft": {"data": data, "training": training(first)}, "dpo": {"data": data, "training": training(second)}}
    sentence = (
        f"dpo: training.lora.load_in_{first}bit rounds weights to {first} bits that were trained beside {first} bits before, "
        "by sft: "
    )
    assert [text.startswith(sentence) for text in warned(store, recipe)] == ([True] if warns else [])


def test_rounds_are_named_in_one_sentence(store: Store, rows: Path) -> None:
    section: dict[str, Any] = {"prompts": {"path": str(rows)}, "rounds": 3, "rewards": SCORED, "training": training(4)}
    recipe: dict[str, Any] = {"method": "iterative-dpo", "name": "demo", "model": MODEL, "iterative_dpo": section}
    (sentence,) = warned(store, recipe)
    assert sentence.startswith("round-2/dpo, round-3/dpo: ")
    assert "before, by round-1/dpo, round-2/dpo: " in sentence
    assert warned(store, recipe | {"iterative_dpo": section | {"rounds": 1}}) == []


def test_rounds_that_start_from_the_same_policy_are_not_warned_about(store: Store, rows: Path) -> None:
    section: dict[str, Any] = {"prompts": {"path": str(rows)}, "rewards": SCORED, "training": training(4)}
    recipe: dict[str, Any] = {"method": "rejection-sampling", "name": "demo", "model": MODEL}
    (sentence,) = warned(store, recipe | {"rejection_sampling": section})
    assert sentence.startswith("round-2/sft: ")
    assert warned(store, recipe | {"rejection_sampling": section | {"start_from": "initial"}}) == []


def test_a_critic_from_a_reward_model_is_warned_about(store: Store, rows: Path) -> None:
    recipe = rl(rows, {"reward_model": "ours"})
    recipe["reward_model"] = {"data": {"path": str(rows)}, "training": training(4)}
    recipe["rl"] |= {"advantage": {"estimator": "gae"}, "critic": {}, "training": training(4)}
    (sentence,) = warned(store, recipe)
    assert sentence.startswith("rl: ")
    assert "before, by reward-model: " in sentence
    recipe["reward_model"]["training"] = training(None)
    assert warned(store, recipe) == []


def test_a_policy_of_an_earlier_run_is_followed_to_its_start(
    store: Store, rows: Path, tmp_path: Path, tiny_model: Any
) -> None:
    """What is trained in between moves weights too little to leave the values of 4 bits."""

    def publish(label: str, key: str, bits: int | None, **inputs: Reference) -> Reference:
        folder = tmp_path / label
        folder.mkdir()
        (folder / "config.json").write_text(f'{{"trained_by": "{label}"}}')
        config = {"training": training(bits)}
        draft = ProvenanceDraft(key=key * 64, stage=label, label=label, config=config, inputs=inputs)
        return store.publish(folder, "model", draft)

    judge = publish("reward_model", "c", 8)
    start = publish("sft", "a", 4)
    policy = publish("dpo", "b", None, model=start, reference_logps=judge)
    store.tags.move("policy/mine", policy, None, "by hand")
    recipe = {**sft(rows), "model": {"name": "policy/mine"}}
    recipe["sft"]["training"] = training(4)
    (sentence,) = warned(store, recipe)
    assert sentence.startswith("sft: ")
    assert f"before, by sft ({start.short}): " in sentence
    recipe["sft"]["training"] = training(8)
    assert warned(store, recipe) == [], "weights of models that only judged are not in the policy"


def test_the_check_of_a_plan_warns(store: Store, rows: Path) -> None:
    recipe = sft(rows)
    recipe["method"] = "dpo"
    pairs = rows.with_name("pairs.jsonl")
    pairs.write_text('{"prompt": "1?", "chosen": "yes", "rejected": "no"}\n' * 40)
    recipe["sft"]["training"] = training(4)
    recipe["dpo"] = {"data": {"path": str(pairs)}, "training": training(4)}
    findings = look(store, recipe)
    assert findings.problems == []
    assert [text for text in findings.warnings if "rounds weights to 4 bits" in text] == warned(store, recipe)
