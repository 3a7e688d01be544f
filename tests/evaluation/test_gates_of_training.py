"""Gates on held-out metrics of training, and the warning about a promotion without gates.

The baseline is chance: a policy that prefers neither answer has a mean margin of 0, and a
reward model that guesses is right for half of its held-out pairs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.comparison import measured_in_training
from alignment.flows.shipped_recipes import file_of, shipped
from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.composition.results import Outputs
from alignment_core.errors import UserError
from alignment_core.evaluation.gates import refusals, warnings
from alignment_core.recipes import load_recipe, parse_recipe
from alignment_core.reporting.run_report import run_report
from tests.align import align_here

MARGIN = {"metric": "test_margin", "min": 0.0001}
JUDGE = {"metric": "reward_model_accuracy", "min": 0.55}
DOCUMENTS = {"path": "rows.jsonl", "test_rows": 10}
ON_POLICY = {"teacher": {"model": "big"}, "on_policy": {"prompts": "prompts.jsonl"}}
LOSS = {"metric": "test_loss", "min_gain": 0}


def dpo(gates: list[dict[str, Any]], test_rows: int = 10, **more: Any) -> Any:
    return parse_recipe(
        {
            "method": "dpo",
            "name": "pairs",
            "model": {"scratch": {}},
            "dpo": {"data": {"path": "pairs.jsonl", "test_rows": test_rows}},
            "promotion": {"gates": gates},
            **more,
        }
    )


def sft(gates: list[dict[str, Any]], training: Any = None, test_rows: int = 10) -> Any:
    section = {"data": {"path": "rows.jsonl", "test_rows": test_rows}, "training": training or {}}
    return parse_recipe(
        {"method": "sft", "name": "a", "model": {"scratch": {}}, "sft": section, "promotion": {"gates": gates}}
    )


@pytest.fixture
def trained(store: Store, tmp_path: Path) -> Any:
    """``trained("dpo", test_margin=-0.2)`` publishes a stand-in for the model of a stage that measured this."""

    def publish(stage: str, **metrics: float) -> Reference:
        folder = tmp_path / stage
        folder.mkdir()
        (folder / "weights").write_text(stage)
        draft = ProvenanceDraft(key=stage.encode().hex().ljust(64, "0"), stage=stage, label=stage, metrics=metrics)
        return store.publish(folder, "model", draft)

    return publish


def test_a_policy_that_prefers_the_worse_answers_of_held_out_pairs_is_refused(store: Store, trained: Any) -> None:
    outputs = Outputs(policy=trained("dpo", test_margin=-0.2, test_loss=0.8, margin=0.5, steps=3))
    measured = measured_in_training(store, outputs)
    assert measured == {"test_margin": -0.2, "test_loss": 0.8}
    (reason,) = refusals(dpo([MARGIN]).promotion.gates, measured, {}, "nothing")
    assert reason.startswith("test_margin is -0.2, 0.2001 below the minimum of 0.0001")


def test_a_policy_of_a_reward_model_that_guesses_is_refused(store: Store, trained: Any) -> None:
    outputs = Outputs(policy=trained("ppo"), reward_model=trained("reward_model", test_accuracy=0.5, accuracy=0.9))
    measured = measured_in_training(store, outputs)
    assert measured == {"reward_model_accuracy": 0.5}
    gates = parse_recipe_with_judge([JUDGE]).promotion.gates
    assert refusals(gates, measured, {}, "nothing") == ["reward_model_accuracy is 0.5, 0.05 below the minimum of 0.55"]


def parse_recipe_with_judge(gates: list[dict[str, Any]], test_rows: int = 10) -> Any:
    return parse_recipe(
        {
            "method": "iterative-dpo",
            "name": "rounds",
            "model": {"scratch": {}},
            "reward_model": {"data": {"path": "pairs.jsonl", "test_rows": test_rows}},
            "iterative_dpo": {"prompts": {"path": "prompts.jsonl"}, "prompts_per_round": 8},
            "promotion": {"gates": gates},
        }
    )


@pytest.mark.parametrize(
    ("before", "after", "gates", "reason"),
    [
        (1.3, 0.9, [LOSS], ""),
        (1.3, 1.3, [LOSS], ""),
        (1.3, 1.5, [LOSS], "gained -0.2 over the start of training, 0.2 less than the required 0"),
        (
            1.3,
            0.9,
            [{**LOSS, "min_gain": 0.5}],
            "gained 0.4 over the start of training, 0.1 less than the required 0.5",
        ),
        (1.3, float("nan"), [LOSS], "test_loss is not on record"),
        (None, 0.9, [LOSS], "test_loss.first is not on record"),
    ],
)
def test_a_loss_that_does_not_fall_is_refused_whatever_the_tag_points_to(
    before: float | None, after: float, gates: list[dict[str, Any]], reason: str, store: Store, trained: Any
) -> None:
    recipe = sft(gates)
    first = {} if before is None else {"test_loss.first": before}
    measured = measured_in_training(store, Outputs(policy=trained("sft", test_loss=after, **first)))
    refused = refusals(recipe.promotion.gates, measured, {"test_loss": 0.1}, "policy/production")
    assert [reason in sentence for sentence in refused] == [True] * bool(reason)
    assert not recipe.promotion.gates[0].compares


def test_a_gain_of_another_metric_of_training_is_a_rise(store: Store, trained: Any) -> None:
    gate = {"metric": "test_accuracy", "min_gain": 0.1}
    first = {"test_accuracy.first": 0.5}
    measured = measured_in_training(store, Outputs(policy=trained("dpo", test_accuracy=0.55, **first)))
    (reason,) = refusals(dpo([gate]).promotion.gates, measured, {}, "nothing")
    assert reason == "test_accuracy gained 0.05 over the start of training, 0.05 less than the required 0.1"


@pytest.mark.parametrize(
    ("section", "measures"),
    [
        ({"method": "continued-pretraining", "continued_pretraining": {"data": DOCUMENTS}}, True),
        ({"method": "distillation", "distillation": {"teacher": {"model": "big"}, "data": DOCUMENTS}}, True),
        ({"method": "distillation", "distillation": {**ON_POLICY, "data": DOCUMENTS}}, False),
        ({"method": "distillation", "distillation": ON_POLICY}, False),
    ],
)
def test_trainings_that_measure_the_loss_of_the_result_can_be_gated_by_it(
    section: dict[str, Any], measures: bool
) -> None:
    content = {"name": "a", "model": {"scratch": {}}, **section}
    assert ("test_loss" in parse_recipe(content).measured_in_training) == measures
    (sentence,) = warnings(parse_recipe({**content, "promotion": {}}))
    assert ("{metric: test_loss, min_gain: 0}" in sentence) == measures


@pytest.mark.parametrize(
    ("make", "gate", "reason"),
    [
        (lambda gates: dpo(gates, test_rows=0), MARGIN, "no training of this recipe measures 'test_margin'"),
        (dpo, JUDGE, "measured: test_margin, test_accuracy, test_loss"),
        (lambda gates: parse_recipe_with_judge(gates, test_rows=0), JUDGE, "hold rows out with `test_rows`"),
        (parse_recipe_with_judge, MARGIN, "measured: reward_model_accuracy"),
        (parse_recipe_with_judge, {**JUDGE, "min_gain": 0}, "`min_gain` makes no sense for 'reward_model_accuracy'"),
        (lambda gates: sft(gates, {"eval_on_start": False}), LOSS, "the training has `eval_on_start: false`"),
        (lambda gates: sft(gates, test_rows=0), LOSS, "no training of this recipe measures 'test_loss'"),
        (dpo, {"metric": "test_margn", "min": 0}, "did you mean 'test_margin'"),
        (dpo, {"metric": "accuracy", "min": 0.5}, "need an `evaluation`"),
    ],
)
def test_a_gate_on_an_unmeasured_metric_is_refused_before_the_run(make: Any, gate: Any, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        make([gate])
    assert reason in str(refused.value)


def test_a_sweep_is_gated_by_metrics_of_its_variants(tmp_path: Path) -> None:
    content = dpo([MARGIN]).model_dump(mode="json", exclude_unset=True)
    betas = {"method": "sweep", "name": "betas", "base": content, "sweep": {"dpo.loss.beta": [0.1, 0.2]}}
    assert "test_margin" in parse_recipe(betas).measured_in_training
    sizes = {**betas, "sweep": {"dpo.data.test_rows": [0, 10]}}
    with pytest.raises(UserError, match="no training of this recipe measures 'test_margin'"):
        parse_recipe(sizes)


def test_a_promotion_without_gates_is_warned_of_with_a_gate_that_fits() -> None:
    def warning(recipe: Any) -> str:
        (sentence,) = warnings(recipe)
        return sentence

    assert warnings(dpo([MARGIN])) == []
    assert "{metric: test_margin, min: 0.0001}" in warning(dpo([]))
    assert "{metric: reward_model_accuracy, min: 0.55}" in warning(parse_recipe_with_judge([]))
    assert "hold rows out" in warning(dpo([], test_rows=0))
    judged = {"evaluation": {"prompts": "prompts.jsonl", "verifier": "math"}}
    assert "{metric: accuracy, min_gain: 0}" in warning(dpo([], test_rows=0, **judged))
    assert warnings(dpo([], promotion=None)) == []


def test_a_gate_on_an_existing_reward_model_is_warned_of_and_refuses_where_nothing_is_on_record(
    store: Store, trained: Any
) -> None:
    recipe = load_recipe(file_of(Path("ppo")), ["reward_model={model: policy/judge}"])
    (warning,) = warnings(recipe)
    assert "if policy/judge was not, the policy will not be promoted" in warning
    known = Outputs(policy=trained("ppo"), reward_model=trained("reward_model", test_accuracy=0.9))
    assert measured_in_training(store, known)["reward_model_accuracy"] == 0.9
    unknown = Outputs(policy=known.policy, reward_model=trained("base_model"))
    assert refusals(parse_recipe_with_judge([JUDGE]).promotion.gates, measured_in_training(store, unknown), {}, "") == [
        "reward_model_accuracy is not on record: the model was not trained here with held-out rows"
    ]


def test_align_check_warns_of_a_promotion_without_gates(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        "method: dpo\nname: pairs\nmodel: {scratch: {}}\ndpo: {data: {path: pairs.jsonl, test_rows: 10}}\npromotion: {}\n"
    )
    done = align_here(tmp_path, "check", str(tmp_path / "recipe.yaml"))
    assert done.returncode == 0, done.stderr
    assert "warning: promotion.gates: there are none" in " ".join(done.stdout.split())
    (warning,) = json.loads(align_here(tmp_path, "check", str(tmp_path / "recipe.yaml"), "--json").stdout)["warnings"]
    assert warning.startswith("promotion.gates: there are none, so policy/production moves to every new policy")


def test_shipped_recipes_that_promote_gate_also_the_trained_reward_model() -> None:
    promoting = [entry.recipe() for entry in shipped("alignment").values() if entry.recipe().promotion is not None]
    assert len(promoting) > 5
    for recipe in promoting:
        assert recipe.promotion is not None
        gated = {gate.metric for gate in recipe.promotion.gates}
        assert gated, recipe.name
        assert set(recipe.measured_in_training) & {"reward_model_accuracy"} <= gated, recipe.name


def test_the_report_of_a_run_begins_with_the_warning(store: Store, tmp_path: Path) -> None:
    (warning,) = warnings(dpo([]))
    report = run_report(store, "pairs", "7eb18dbf", [], {}, None, (warning,))
    text = report.write(tmp_path).read_text()
    assert "**Warning:** promotion.gates: there are none" in text[:300]
