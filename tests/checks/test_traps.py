"""Known traps: which recipes are warned about, and that the shipped ones are not."""

from __future__ import annotations

from typing import Any

import pytest

from alignment.flows.custom_flow import Settings
from alignment.flows.shipped_recipes import FOLDER
from alignment_core.checks import traps
from alignment_core.recipes import TrainingConfig, load_recipe, parse_recipe
from tests.recipes.contents import NIGHT
from tests.recipes.test_section_defaults import PAIRS, RL, parsed

JUDGE = {"reward_model": {"model": {"name": "some/judge"}}}
GSM8K = {"prompts": {"path": "p.jsonl"}, "selection": {"score": "verifier"}}


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with instructions for bf16, whatever this machine has."""
    monkeypatch.setattr(traps, "cpu_multiplies_bf16", lambda: True)


def warned(recipe: Any) -> list[str]:
    return [sentence.split(":")[0] for sentence in traps.warnings(recipe)]


@pytest.mark.parametrize(
    ("rate", "lora", "fields"),
    [
        (1e-6, None, []),
        (1e-5, None, []),
        (5e-5, None, ["dpo.training.learning_rate"]),
        (1e-6, {}, ["dpo.training.learning_rate"]),
        (1e-5, {}, []),
    ],
)
def test_a_learning_rate_far_from_the_methods_is_warned_about(rate: float, lora: Any, fields: list[str]) -> None:
    changes = [("dpo.training.learning_rate", rate), *([("dpo.training.lora", lora)] if lora is not None else [])]
    assert warned(parsed("dpo", PAIRS, *changes)) == fields


def test_adapters_at_the_default_rate_of_full_training_are_warned_about_in_every_method() -> None:
    sft = {"sft": {"data": "rows.jsonl", "training": {"lora": {"r": 8}}}}
    (sentence,) = traps.warnings(parsed("sft", sft))
    assert sentence == (
        "sft.training.learning_rate: 1e-05 is a rate for training all weights; adapters need about ten times as much, such as "
        "0.0001 (Schulman et al. 2025, LoRA Without Regret)"
    )


def test_models_from_scratch_may_have_any_learning_rate() -> None:
    scratch = {"scratch": {"hidden_size": 16, "num_attention_heads": 2}}
    assert warned(parsed("dpo", PAIRS, ("model", scratch), ("dpo.training.learning_rate", 1e-3))) == []


def test_a_warm_up_that_training_does_not_outlast_is_warned_about() -> None:
    short = [("dpo.training.max_steps", 5), ("dpo.training.warmup_steps", 5)]
    assert warned(parsed("dpo", PAIRS, *short)) == ["dpo.training.warmup_steps"]
    assert warned(parsed("dpo", PAIRS, *short[1:])) == []
    assert warned(parsed("rl", RL, ("rl.training.warmup_steps", 100))) == ["rl.training.warmup_steps"]
    assert warned(parsed("rl", RL, ("rl.training.warmup_steps", 99))) == []
    critic = [("rl.advantage.estimator", "gae"), ("rl.critic", {"warmup_steps": 100})]
    assert warned(parsed("rl", RL, *critic)) == ["rl.critic.warmup_steps"]
    frozen = [critic[0], ("rl.critic", {"freezing_steps": 60}), ("rl.training.warmup_steps", 40)]
    assert warned(parsed("rl", RL, *frozen)) == ["rl.training.warmup_steps"], "which begins after the frozen steps"


def test_simpo_with_the_beta_of_dpo_is_warned_about() -> None:
    assert warned(parsed("dpo", PAIRS, ("dpo.loss", {"loss_type": "simpo", "beta": 0.1}))) == ["dpo.loss.beta"]
    assert warned(parsed("dpo", PAIRS, ("dpo.loss", {"loss_type": "simpo"}))) == []


def test_a_learned_reward_without_a_kl_penalty_is_warned_about() -> None:
    learned = {"rl": {**RL["rl"], "rewards": [{"reward_model": {"name": "some/judge"}}]}}
    assert warned(parsed("rl", learned, ("rl.kl.coefficient", 0))) == ["rl.kl.coefficient"]
    assert warned(parsed("rl", learned)) == [], "the default with a reward model is above 0"
    assert warned(parsed("rl", learned, ("rl.kl.coefficient", 0.01))) == []
    assert warned(parsed("rl", RL)) == [], "a verifier is not learned"


@pytest.mark.parametrize(
    ("kl", "warns"),
    [
        ({"estimator": "k1"}, True),
        ({"estimator": "k1", "unbiased_gradient": True}, False),
        ({"estimator": "k1", "coefficient": 0}, False),
        ({}, False),
        ({"estimator": "k2"}, False),
        ({"place": "reward"}, False),
        ({"place": "reward", "estimator": "k2"}, True),
        ({"place": "reward", "estimator": "k3"}, True),
    ],
)
def test_an_estimator_whose_gradient_is_not_that_of_the_kl_is_warned_about(kl: dict[str, Any], warns: bool) -> None:
    fields = warned(parsed("rl", RL, ("rl.kl", {"coefficient": 0.1, **kl})))
    assert fields == (["rl.kl.estimator"] if warns else [])


def test_gspo_by_token_is_warned_about() -> None:
    """As by TRL 1.16's GRPOTrainer for `importance_sampling_level: sequence` with losses that sum over tokens."""
    assert warned(parsed("rl", RL, ("rl.loss", {"loss_type": "gspo"}))) == ["rl.loss.aggregation"]
    by_sequence = {"loss_type": "gspo", "aggregation": "sequence-mean-token-mean"}
    assert warned(parsed("rl", RL, ("rl.loss", by_sequence))) == []
    assert warned(parsed("rl", RL, ("rl.loss", {"loss_type": "cispo"}))) == []


def test_the_best_of_wrong_answers_is_warned_about() -> None:
    content = {"rejection_sampling": GSM8K, "evaluation": {"prompts": {"path": "q.jsonl"}, "verifier": "math"}}
    assert warned(parsed("rejection-sampling", content)) == ["rejection_sampling.selection.min_score"]
    assert warned(parsed("rejection-sampling", content, ("rejection_sampling.selection.min_score", 1))) == []


def test_gates_by_the_optimised_reward_alone_are_warned_about() -> None:
    rounds = {
        **JUDGE,
        "iterative_dpo": {"prompts": {"path": "p.jsonl"}},
        "evaluation": {"prompts": {"path": "q.jsonl"}},
    }
    gates = [{"metric": "reward", "min_gain": 0}]
    promoted = ("promotion", {"tag": "policy/production", "gates": gates})
    assert warned(parsed("iterative-dpo", rounds, promoted)) == ["promotion.gates"]
    ends = ("promotion", {"tag": "policy/production", "gates": [{"metric": "win_rate.low", "min": 0.5}]})
    assert warned(parsed("iterative-dpo", rounds, ends)) == ["promotion.gates"]
    ours = ("evaluation.rewards", [{"reward_model": "ours"}])
    assert warned(parsed("iterative-dpo", rounds, promoted, ours)) == ["promotion.gates"]
    served = ("iterative_dpo.rewards", [{"urls": ["http://127.0.0.1:9/score"]}])
    assert warned(parsed("iterative-dpo", rounds, promoted, served)) == [], "the reward model only evaluates"
    second = ("evaluation.rewards", [{"reward_model": {"name": "another/judge"}}])
    assert warned(parsed("iterative-dpo", rounds, promoted, second)) == []
    check = ("evaluation.rewards", [{"reward_model": {"name": "another/judge"}}, {"reward_model": "ours", "weight": 0}])
    assert warned(parsed("iterative-dpo", rounds, promoted, check)) == []
    reversed_ = ("evaluation.rewards", [{"reward_model": {"name": "a/b"}, "weight": 0}, {"reward_model": "ours"}])
    assert warned(parsed("iterative-dpo", rounds, promoted, reversed_)) == ["promotion.gates"], (
        "only `reward_0` is another's"
    )
    only = ("promotion", {"tag": "policy/production", "gates": [{"metric": "reward_1", "min_gain": 0}]})
    assert warned(parsed("iterative-dpo", rounds, only, check)) == ["promotion.gates"]


def test_gates_on_drift_and_on_the_reward_model_itself_do_not_judge_answers() -> None:
    gates = [{"metric": "win_rate.low", "min": 0.5}, {"metric": "kl", "max": 50}]
    recipe = {
        "reward_model": {"data": {"path": "pairs.jsonl", "test_rows": 10}},
        "iterative_dpo": {"prompts": {"path": "p.jsonl"}},
        "evaluation": {"prompts": {"path": "q.jsonl"}},
        "promotion": {"tag": "policy/a", "gates": [*gates, {"metric": "reward_model_accuracy", "min": 0.6}]},
    }
    assert warned(parsed("iterative-dpo", recipe)) == ["promotion.gates"]
    assert warned(parsed("iterative-dpo", recipe, ("evaluation.verifier", "math"))) == ["promotion.gates"]
    accuracy = {"tag": "policy/a", "gates": [*gates, {"metric": "accuracy", "min_gain": 0}]}
    assert warned(parsed("iterative-dpo", recipe, ("evaluation.verifier", "math"), ("promotion", accuracy))) == []


def test_a_named_reward_model_that_trains_the_policy_does_not_judge_it_alone_either() -> None:
    learned = [{"reward_model": {"name": "some/judge"}}]
    rl = {"rl": {**RL["rl"], "rewards": learned, "kl": {"coefficient": 0.05}}}
    gates = {"tag": "policy/a", "gates": [{"metric": "win_rate.low", "min": 0.5}]}
    judged = ("evaluation", {"prompts": {"path": "q.jsonl"}, "rewards": learned})
    other = ("evaluation", {"prompts": {"path": "q.jsonl"}, "rewards": [{"reward_model": {"name": "another/judge"}}]})
    assert warned(parsed("rl", rl, judged, ("promotion", gates))) == ["promotion.gates"]
    assert warned(parsed("rl", rl, other, ("promotion", gates))) == []


def test_a_process_reward_model_that_trains_the_policy_is_not_the_reward_model_that_judges_it() -> None:
    trained = [{"process_reward_model": {"name": "some/judge"}}]
    judged = {"prompts": {"path": "q.jsonl"}, "rewards": [{"reward_model": {"name": "some/judge"}}]}
    gates = {"tag": "policy/a", "gates": [{"metric": "win_rate.low", "min": 0.5}]}
    rl = {"rl": {**RL["rl"], "rewards": trained, "kl": {"coefficient": 0.05}}, "evaluation": judged, "promotion": gates}
    assert warned(parsed("rl", rl)) == []
    assert warned(parsed("rl", rl, ("evaluation.rewards", trained))) == ["promotion.gates"]


def test_branches_of_a_comparison_are_warned_about_by_name() -> None:
    recipe = parse_recipe(
        {
            "method": "comparison",
            "name": "a",
            "model": "some/model",
            "branches": {
                "simpo": {"method": "dpo", "dpo": {**PAIRS["dpo"], "loss": {"loss_type": "simpo", "beta": 0.1}}}
            },
            "evaluation": {"prompts": {"path": "q.jsonl"}, "rewards": [{"reward_model": {"name": "a/judge"}}]},
        }
    )
    assert warned(recipe) == ["branches.simpo.dpo.loss.beta"]


def test_what_branches_share_is_warned_about_once() -> None:
    slow = {"data": "rows.jsonl", "training": {"lora": {}}}
    branches = {name: {"method": "dpo", "dpo": PAIRS["dpo"]} for name in ("a", "b")}
    judged = {"prompts": {"path": "q.jsonl"}, "rewards": [{"reward_model": {"name": "a/judge"}}]}
    content = {"method": "comparison", "name": "a", "model": "some/model", "sft": slow}
    assert warned(parse_recipe({**content, "branches": branches, "evaluation": judged})) == [
        "sft.training.learning_rate"
    ]


def test_variants_of_a_sweep_are_warned_about_by_name() -> None:
    base = {"method": "dpo", "dpo": {**PAIRS["dpo"], "loss": {"loss_type": "simpo"}}}
    evaluation = {"prompts": {"path": "q.jsonl"}, "verifier": "math"}
    content = {"method": "sweep", "name": "a", "model": "some/model", "base": base, "evaluation": evaluation}
    swept = parse_recipe({**content, "sweep": {"dpo.loss.beta": [0.1, 2.0]}})
    (sentence,) = traps.warnings(swept)
    assert sentence.startswith("beta=0.1: dpo.loss.beta: 0.1 is DPO's")


def test_orpo_is_judged_by_its_own_learning_rate() -> None:
    orpo = ("dpo.loss.loss_type", "orpo")
    assert warned(parsed("dpo", PAIRS, orpo, ("dpo.training.learning_rate", 2e-5))) == []
    assert warned(parsed("dpo", PAIRS, orpo, ("dpo.training.lora", {}))) == ["dpo.training.learning_rate"]


def test_rounds_of_few_steps_are_warned_about() -> None:
    """64 prompts give 64 pairs, which are 2 batches of 32; of all pairs up to 16 per prompt are kept, which are 32 batches."""
    rounds = {**JUDGE, "iterative_dpo": {"prompts": {"path": "p.jsonl"}, "prompts_per_round": 64}}
    recipe = parsed("iterative-dpo", rounds)
    (sentence,) = traps.warnings(recipe)
    assert sentence.startswith("iterative_dpo.prompts_per_round: 64 with a batch_size of 32 are 2 optimiser steps")
    assert warned(parsed("iterative-dpo", rounds, ("iterative_dpo.training.num_train_epochs", 15))) == []
    assert warned(parsed("iterative-dpo", rounds, ("iterative_dpo.prompts_per_round", 1024))) == []
    limited = [("iterative_dpo.prompts_per_round", 1024), ("iterative_dpo.training.max_steps", 29)]
    assert warned(parsed("iterative-dpo", rounds, *limited)) == ["iterative_dpo.prompts_per_round"]
    pairs = {"strategy": "all_pairs", "max_pairs_per_prompt": 16}
    assert warned(parsed("iterative-dpo", rounds, ("iterative_dpo.selection", pairs))) == []
    assert warned(parsed("iterative-dpo", rounds, ("model", {"scratch": {"hidden_size": 16}}))) == []


@pytest.mark.parametrize(("min_rows", "fields"), [(None, ["nightly.min_rows"]), (928, ["nightly.min_rows"]), (929, [])])
def test_nights_of_few_steps_are_warned_about(min_rows: int | None, fields: list[str]) -> None:
    """928 rows are 29 batches of 32."""
    nightly = {} if min_rows is None else {"nightly": {"min_rows": min_rows}}
    assert warned(parse_recipe(NIGHT | nightly)) == fields


def test_fields_of_a_plug_in_may_be_named_as_ours_and_hold_lists_of_sections() -> None:
    class Mine(Settings):
        recipes: int = 3
        variants: tuple[str, ...] = ("a",)
        rl: str = "none"
        trainings: tuple[TrainingConfig, ...] = ()

    mine = Mine(name="mine", model={"name": "some/model"}, trainings=[{"lora": {}}])  # type: ignore[arg-type]
    assert warned(mine) == ["trainings.0.learning_rate"]


def test_sections_of_a_users_flow_have_the_defaults_of_their_class() -> None:
    class Mine(Settings):
        training: TrainingConfig = TrainingConfig()

    mine = Mine(name="mine", model={"name": "some/model"}, training={"lora": {}})  # type: ignore[arg-type]
    assert warned(mine) == ["training.learning_rate"]


def test_small_batches_of_kto_are_warned_about() -> None:
    kto = {"kto": {"data": "rows.jsonl", "training": {"batch_size": 8}}}
    assert warned(parsed("kto", kto)) == ["kto.training.batch_size"]
    assert warned(parsed("kto", kto, ("kto.training.batch_size", 16))) == []
    assert warned(parsed("kto", kto, ("kto.loss.loss_type", "apo_zero_unpaired"))) == [], "it has no baseline"


def test_a_gain_that_the_prompts_cannot_show_is_warned_about() -> None:
    """On 100 prompts the standard error of a share is up to sqrt(0.25 / 100) = 0.05; 0.02 needs 0.25 / 0.02² = 625."""
    promoted = {"tag": "policy/a", "gates": [{"metric": "accuracy", "min_gain": 0.02}]}
    judged = {"prompts": {"path": "q.jsonl", "rows": 100}, "verifier": "math"}
    recipe = {"sft": {"data": "rows.jsonl"}, "evaluation": judged, "promotion": promoted}
    (sentence,) = traps.warnings(parsed("sft", recipe))
    assert sentence.startswith(
        "promotion.gates.0.min_gain: 0.02 is less than the standard error of an accuracy on 100 "
    )
    assert "up to 0.05" in sentence
    assert "625 prompts or more" in sentence
    for gain in (0, 0.06):  # no worse, within the error, and more than it
        gates = [{"metric": "accuracy", "min_gain": gain}]
        assert warned(parsed("sft", recipe, ("promotion.gates", gates))) == []
    assert warned(parsed("sft", recipe, ("evaluation.prompts", "q.jsonl"))) == [], "how many is not known"


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_shipped_recipes_have_none_of_the_traps(file: Any) -> None:
    # A model of 135M parameters takes larger steps than the defaults, which are for billions: docs/real-model.md.
    proven = "training.learning_rate" if file.stem == "real-model" else None
    assert [sentence for sentence in traps.warnings(load_recipe(file)) if not proven or proven not in sentence] == []


@pytest.mark.parametrize(
    ("has_gpu", "changes", "fields"),
    [
        (False, [("sft.training.bf16", True)], ["sft.training.bf16"]),
        (False, [], []),
        (False, [("sft.training.bf16", True), ("resources.device", "cuda")], []),
        (True, [("sft.training.bf16", True)], []),
        (True, [("sft.training.bf16", True), ("resources.device", "cpu")], ["sft.training.bf16"]),
    ],
)
def test_bf16_on_a_processor_without_its_instructions_is_warned_about(
    has_gpu: bool, changes: list[Any], fields: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traps, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr("alignment_core.doctor.machine.has_gpu", lambda: has_gpu)
    assert warned(parsed("sft", {"sft": {"data": "rows.jsonl"}}, *changes)) == fields


@pytest.mark.parametrize(
    ("has_gpu", "changes", "fields"),
    [
        (True, [], ["sft.training.bf16"]),
        (True, [("sft.training.bf16", True)], []),
        (True, [("sft.training.optimizer", "muon")], []),
        (True, [("resources.device", "cpu")], []),
        (True, [("model", {"scratch": {"hidden_size": 16, "num_attention_heads": 2}})], []),
        (False, [], []),
        (False, [("resources.device", "cuda")], []),
        (False, [("resources.device", "cuda"), ("sft.training.bf16", False)], ["sft.training.bf16"]),
    ],
)
def test_fp32_on_a_gpu_is_warned_about(
    has_gpu: bool, changes: list[Any], fields: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment_core.doctor.machine.has_gpu", lambda: has_gpu)
    assert warned(parsed("sft", {"sft": {"data": "rows.jsonl"}}, *changes)) == fields
