"""The composition of recipes: their stages and inputs. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment.flows.comparison import compare
from alignment.flows.shipped_recipes import for_large_models
from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.composition.graph import BranchFailed, NotMade, StageSpec, composing
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.execution.base import StageCall
from alignment_core.execution.key import stage_seed
from alignment_core.methods import nightly
from alignment_core.models.tokenizer import CHAT_TEMPLATE, byte_tokenizer
from alignment_core.recipes import parse_recipe
from alignment_core.recipes.methods import method_of

MODEL = {"scratch": {"hidden_size": 16, "num_attention_heads": 2}}
TASK = {"task": "first", "rows": 20}
SFT = {"data": TASK}
PAIRS = {"data": TASK}
EVALUATION = {"prompts": {**TASK, "split": "test"}, "verifier": "task"}
ROUNDS = {"rounds": 1, "prompts": TASK, "prompts_per_round": 8}
GATES = {"gates": [{"metric": "accuracy", "min_gain": 0}]}
RL = {
    "prompts": TASK,
    "prompts_per_step": 4,
    "steps": 1,
    "rewards": [{"verifier": "task"}],
    "advantage": {"estimator": "group"},
    "best": {"prompts": {**TASK, "split": "test"}},
}
RECIPES: dict[str, dict[str, Any]] = {
    "sft": {"sft": SFT},
    "dpo": {"sft": SFT, "dpo": PAIRS},
    "kto": {"sft": SFT, "kto": PAIRS},
    "process-reward-model": {
        "sft": SFT,
        "reward_model": PAIRS,
        "process_reward_model": PAIRS,
        "evaluation": {
            **EVALUATION,
            "generation": {"num_generations": 2},
            "verifier": "task",
            "rewards": [{"process_reward_model": "ours"}, {"reward_model": "ours"}],
        },
    },
    "iterative-dpo": {"sft": SFT, "reward_model": PAIRS, "iterative_dpo": ROUNDS},
    "rl": {"sft": SFT, "rl": RL},
    "evaluate": {"models": {"other": MODEL}},
    "distillation": {
        "distillation": {
            "teacher": {"model": MODEL, "sft": SFT},
            "data": TASK,
            "on_policy": {"prompts": TASK, "rounds": 2, "prompts_per_round": 8},
        }
    },
    "conditional-sft": {
        "sft": SFT,
        "conditional_sft": {
            "prompts": TASK,
            "attributes": {"correct": {"reward": {"verifier": "task"}, "decimals": 0}},
            "wanted": [{"correct": 1}, {"correct": 0}],
        },
    },
    "merge": {"sft": SFT, "merge": {"models": [{}, {"sft": SFT}], "merge_method": "ties"}},
}


class Composed:
    """A run that records submitted stages, because a real one would train."""

    def __init__(self, store: Store) -> None:
        self.store, self.seed = store, 5
        self.training_data: dict[str, Any] = {}
        self.trust_remote_code = False
        self.inputs: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, Any] = {}
        self.after: dict[str, str] = {}
        self.artifacts: dict[str, Reference] = {}
        self.failures: dict[str, Exception] = {}

    def submit(self, spec: StageSpec) -> Any:
        label = spec.label
        if spec.after is not None:
            self.after[label] = spec.after.label
        self.inputs[label] = dict(spec.inputs)
        self.configs[label] = spec.config
        return SimpleNamespace(
            label=label,
            result=lambda: self._not_made(label, spec.may_fail),
            artifact=lambda: self.artifacts[label] if label in self.artifacts else self._not_made(label),
            output=lambda name: SimpleNamespace(label=f"{label} ({name})", artifact=lambda: self.artifacts[label]),
        )

    def _not_made(self, label: str, may_fail: bool = False) -> Reference:
        if error := self.failures.get(label):
            raise BranchFailed(error) if may_fail else error
        raise NotMade(label)

    def roles(self, label: str) -> dict[str, str]:
        return {role: getattr(value, "label", str(value)) for role, value in self.inputs[label].items()}


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    run = Composed(open_store(tmp_path / "store"))
    with composing(run):
        yield run


def compose(run: Composed, method: str, **fields: Any) -> Any:
    content = {"name": "one", "model": MODEL, "evaluation": EVALUATION, **RECIPES[method], **fields}
    recipe = parse_recipe({"method": method, **content})
    return method_of(recipe).compose(recipe)


@pytest.mark.parametrize(
    ("method", "trained"),
    [
        ("sft", {"sft/data"}),
        ("dpo", {"sft/data", "dpo/data"}),
        ("kto", {"sft/data", "kto/data"}),
        ("process-reward-model", {"sft/data", "reward-model/data", "process-reward-model/data"}),
        ("iterative-dpo", {"sft/data", "reward-model/data", "rounds/prompts"}),
        ("rl", {"sft/data", "rl/prompts"}),
        ("merge", {"sft/data", "model-2/sft/data"}),
        ("distillation", {"teacher/sft/data", "distillation/data", "distillation/prompts"}),
        ("conditional-sft", {"sft/data", "conditional-sft/prompts", "conditional-sft/data"}),
    ],
)
def test_held_out_prompts_are_compared_with_all_training_data(composed, method, trained):
    compose(composed, method)
    assert composed.roles("evaluation/overlap") == {"held_out": "evaluation/prompts", **{key: key for key in trained}}
    assert composed.roles("report")["overlap"] == "evaluation/overlap"
    if method == "rl":
        assert composed.roles("rl/held-out/overlap") == {"held_out": "rl/held-out", **{key: key for key in trained}}


def test_merged_models_are_the_initial_policy_or_trained_from_it(composed):
    compose(composed, "merge")
    assert composed.roles("model-2/sft") == {"model": "sft", "data": "model-2/sft/data"}
    assert composed.roles("model-2/sft/data") == {"tokenizer": "model"}
    assert composed.roles("merge") == {"model-1": "sft", "model-2": "model-2/sft", "base": "sft"}


def test_models_side_by_side_are_compared_with_the_first(composed):
    outputs = compose(
        composed, "evaluate", evaluation={**EVALUATION, "pass_at": [1, 2], "generation": {"num_generations": 2}}
    )
    assert outputs.policy is None
    assert composed.roles("other/evaluation/score")["reference"] == "model"
    assert composed.roles("other/evaluation")["baseline_scores"] == "model/evaluation/score"
    assert composed.configs["other/evaluation"].pass_at == (1, 2)
    assert composed.configs["report"].policies == ("model", "other")


def test_the_kl_is_measured_at_the_temperature_of_the_evaluation(composed):
    compose(composed, "evaluate", evaluation={**EVALUATION, "generation": {"temperature": 0.7}})
    assert composed.configs["other/evaluation/score"].temperature == 0.7
    assert composed.configs["other/evaluation/score"].content()["temperature"] == 0.7
    assert composed.configs["model/evaluation/score"].temperature == 1, "the baseline has no reference"


@pytest.mark.parametrize("generation", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
def test_no_kl_is_measured_where_sampling_excludes_tokens(composed, generation):
    compose(composed, "evaluate", evaluation={**EVALUATION, "generation": generation})
    assert "reference" not in composed.roles("other/evaluation/score")


def test_an_overlap_is_refused_only_if_a_gate_depends_on_the_prompts(composed):
    compose(composed, "sft")
    assert composed.configs["evaluation/overlap"].max_overlap is None
    compose(composed, "sft", promotion=GATES)
    assert composed.configs["evaluation/overlap"].max_overlap == 0
    compose(composed, "sft", promotion=GATES, evaluation={**EVALUATION, "max_overlap": 0.5})
    assert composed.configs["evaluation/overlap"].max_overlap == 0.5


REWARDS = [
    {"verifier": "task"},
    {"reward_model": MODEL, "weight": 0.5, "normalise": "group"},
    {"reward_model": "ours"},
]


def test_the_rounds_have_the_engines_before_the_evaluations(composed):
    compose(composed, "iterative-dpo", iterative_dpo={**ROUNDS, "rounds": 2})
    assert composed.after == {
        "sft/evaluation/generate": "round-1/generate",
        "round-1/evaluation/generate": "round-2/generate",
    }


def test_rounds_and_evaluation_have_their_own_lists_of_rewards(composed):
    section = {**ROUNDS, "rewards": REWARDS}
    compose(composed, "iterative-dpo", iterative_dpo=section, evaluation={**EVALUATION, "rewards": REWARDS})
    of_evaluation, of_round = composed.configs["sft/evaluation/score"], composed.configs["round-1/score"]
    assert composed.roles("round-1/score") == {
        "rollouts": "round-1/generate",
        "tokenizer": "sft",
        "reward-1": "rounds/reward-1",
        "reward-2": "reward-model",
    }
    assert composed.roles("round-1/evaluation/score") == {
        "rollouts": "round-1/evaluation/generate",
        "tokenizer": "round-1/dpo",
        "reference": "sft",
        "reward-1": "evaluation/reward-1",
        "reward-2": "reward-model",
    }
    assert (of_round.field, of_round.verifier, of_evaluation.verifier) == ("iterative_dpo.rewards", None, "task")
    assert (of_round.across_policies, of_evaluation.across_policies) == (False, True)
    assert of_evaluation.content()["across_policies"]
    without = of_evaluation.model_copy(update={"rewards": of_evaluation.rewards[:1]})
    assert "across_policies" not in without.content(), "the key of other scores stays"
    assert [reward.normalise for reward in of_round.rewards] == ["none", "group", "none"]
    assert [reward.normalise for reward in of_evaluation.rewards] == ["none"] * 3, (
        "normalised by its own samples every policy would be average"
    )


def test_the_section_reward_model_is_the_default_reward(composed):
    compose(composed, "iterative-dpo")
    by_default = {name: (composed.configs[name], composed.roles(name)) for name in composed.inputs if "score" in name}
    assert len(by_default) == 3
    ours = {"rewards": [{"reward_model": "ours"}]}
    compose(composed, "iterative-dpo", iterative_dpo={**ROUNDS, **ours}, evaluation={**EVALUATION, **ours})
    assert {name: (composed.configs[name], composed.roles(name)) for name in by_default} == by_default
    selection = {"selection": {"score": "verifier"}}
    compose(composed, "iterative-dpo", iterative_dpo={**ROUNDS, **selection}, reward_model=None)
    assert (composed.configs["round-1/score"].rewards, composed.configs["round-1/score"].verifier) == ((), "task")
    assert composed.roles("round-1/score") == {"rollouts": "round-1/generate"}


def test_reference_logps_of_dpo_do_not_depend_on_other_training_settings(composed):
    compose(composed, "dpo")
    plain = composed.configs["dpo/reference-logps"]
    assert composed.roles("dpo/reference-logps") == {"model": "sft", "data": "dpo/data"}
    assert composed.roles("dpo") == {"model": "sft", "data": "dpo/data", "reference_logps": "dpo/reference-logps"}

    other = {"learning_rate": 1e-3, "num_train_epochs": 3, "warmup_ratio": 0.1, "batch_size": 7, "lora": {"r": 2}}
    loss = {"loss_type": "ipo", "beta": 0.3, "nll_weight": 1.0}
    compose(composed, "dpo", dpo={**PAIRS, "training": other, "loss": loss})
    assert composed.configs["dpo/reference-logps"] == plain
    compose(composed, "dpo", dpo={**PAIRS, "training": {"bf16": True}})
    assert composed.configs["dpo/reference-logps"] != plain
    for field in ("load_in_4bit", "load_in_8bit"):
        compose(composed, "dpo", dpo={**PAIRS, "training": {"lora": {field: True}}})
        assert composed.configs["dpo/reference-logps"].model_dump() == {**plain.model_dump(), field: True}

    few = {"max_steps": 3, "batch_size": 4}
    compose(composed, "dpo", dpo={**PAIRS, "training": few})
    config = composed.configs["dpo/reference-logps"]
    seed = stage_seed(StageCall(stage="dpo", label="dpo", config={}, inputs={}, seed=composed.seed))
    assert config.model_dump() == {"bf16": False, **few, "order": seed}, "the order in which the stage dpo takes rows"
    compose(composed, "dpo", dpo={**PAIRS, "training": {**few, **other, "batch_size": 4}, "loss": loss})
    assert composed.configs["dpo/reference-logps"] == config


def test_a_conditional_policy_gets_the_wanted_values_and_its_start_does_not(composed):
    compose(composed, "conditional-sft")
    assert composed.roles("conditional-sft/data") == {"tokenizer": "model", "rows": "conditional-sft/attributes"}
    assert composed.configs["conditional-sft/data"].kind == "sampled", "as sampled, not as rendered again"
    assert composed.configs["conditional-sft/data"].data.prompt_template == "{prompt} [correct={correct}]"
    assert composed.roles("sft/evaluation/generate")["prompts"] == "evaluation/prompts"
    assert composed.configs["evaluation/prompts"].data.prompt_template is None
    for label, value in (("wanted", 1), ("wanted-2", 0)):
        roles = {"policy": "conditional-sft", "prompts": f"{label}/evaluation/prompts"}
        assert composed.roles(f"{label}/evaluation/generate") == roles
        assert composed.configs[roles["prompts"]].data.prompt_template == f"{{prompt}} [correct={value}]"


def test_completions_of_the_prompts_that_are_sampled_are_all_trained_on(composed):
    """Prompts can be held out from sampling; completions held out on top would serve nothing."""
    sampled = RECIPES["conditional-sft"]["conditional_sft"]
    compose(composed, "conditional-sft", conditional_sft={**sampled, "prompts": {**TASK, "test_rows": 4}})
    assert composed.configs["conditional-sft/prompts"].data.test_rows == 4
    assert composed.configs["conditional-sft/data"].data.test_rows == 0


def test_the_wanted_values_are_written_around_the_prompts_own_template(composed):
    """As around the prompts that the completions answer, whose template comes first, too."""
    own = "Q: {prompt} {{{level:>3}}}"
    evaluation = {**EVALUATION, "prompts": {**TASK, "prompt_template": own}}
    compose(composed, "conditional-sft", evaluation=evaluation)
    assert composed.configs["evaluation/prompts"].data.prompt_template == own
    assert composed.configs["wanted/evaluation/prompts"].data.prompt_template == f"{own} [correct=1]"


def test_a_student_learns_from_the_teachers_logps_of_given_text_and_then_of_its_samples(composed):
    compose(composed, "distillation")
    teacher = {"model": "teacher/sft", "student": "model"}
    assert composed.roles("distillation/teacher-logps") == {**teacher, "data": "distillation/data"}
    assert composed.roles("distillation") == {"model": "model", "data": "distillation/teacher-logps"}
    before = "distillation"
    for number in (1, 2):
        label = f"distillation/round-{number}"
        assert composed.roles(f"{label}/sample") == {"policy": before, "prompts": "distillation/prompts"}
        assert composed.roles(f"{label}/teacher-logps") == {**teacher, "rollouts": f"{label}/sample"}
        assert composed.roles(label) == {"model": before, "data": f"{label}/teacher-logps"}
        before = label
    assert composed.roles("student/evaluation/generate")["policy"] == before


def test_a_loss_without_a_reference_computes_none(composed):
    compose(composed, "dpo", dpo={**PAIRS, "loss": {"loss_type": "simpo", "beta": 2.0}})
    assert composed.roles("dpo") == {"model": "sft", "data": "dpo/data"}
    free = {"orpo": 1.0, "simpo": 1.0}
    compose(composed, "iterative-dpo", iterative_dpo={**ROUNDS, "loss": {"loss_weights": free, "nll_weight": 1.0}})
    assert not [label for label in composed.configs if "reference-logps" in label]
    more = {**free, "hinge": 0.1}
    compose(composed, "iterative-dpo", iterative_dpo={**ROUNDS, "loss": {"loss_weights": more, "nll_weight": 1.0}})
    assert composed.roles("round-1/dpo")["reference_logps"] == "round-1/reference-logps"


def test_a_judge_compares_each_policy_with_the_baseline_on_the_same_prompts(composed):
    judge = {"judge": "http://127.0.0.1:1/v1", "judge_model": "m"}
    compose(composed, "dpo", evaluation={**EVALUATION, "judge": judge})
    roles = {"rollouts": "dpo/evaluation/generate", "baseline": "start/evaluation/generate"}
    assert composed.roles("dpo/evaluation/judge") == roles
    assert composed.roles("dpo/evaluation")["verdicts"] == "dpo/evaluation/judge"
    assert "verdicts" not in composed.roles("start/evaluation")
    assert "start/evaluation/judge" not in composed.inputs


def test_the_kl_of_rl_may_be_to_another_model(composed):
    compose(composed, "rl")
    assert "reference" not in composed.roles("rl")
    compose(composed, "rl", rl={**RL, "kl": {"coefficient": 0.1, "reference": MODEL}})
    assert composed.roles("rl")["reference"] == "rl/reference"
    assert "reference" not in composed.configs["rl"].content()["kl"], "it is an input"


@pytest.mark.parametrize(
    ("rewards", "critic"),
    [
        ([{"served_judge": MODEL}, {"reward_model": MODEL}, {"reward_model": "ours"}], "rl/reward-1"),
        ([{"process_reward_model": MODEL}, {"reward_model": "ours"}], "reward-model"),
        ([{"served_judge": MODEL}, {"process_reward_model": MODEL}], None),
    ],
)
def test_a_critic_starts_from_the_first_reward_model_and_from_no_other_judge(composed, rewards, critic):
    section = {**RL, "rewards": rewards, "advantage": {"estimator": "gae"}, "critic": {}}
    ours = {"reward_model": PAIRS} if {"reward_model": "ours"} in rewards else {}
    compose(composed, "rl", rl=section, **ours)
    assert composed.roles("rl").get("critic") == critic


def test_reward_models_of_steps_and_of_answers_choose_among_the_same_answers(composed):
    compose(composed, "process-reward-model")
    assert composed.configs["process-reward-model/data"].settings == {"separator": "\n", "placeholder": None}
    assert composed.roles("process-reward-model") == {"model": "sft", "data": "process-reward-model/data"}
    judges = {"reward-0": "process-reward-model", "reward-1": "reward-model"}
    assert composed.roles("sft/evaluation/score").items() >= judges.items()
    assert composed.roles("sft/evaluation/best-of-n") == {"scores": "sft/evaluation/score"}
    names = composed.configs["sft/evaluation/best-of-n"].rewards
    assert names == ("process reward model (min)", "reward model")


def test_kto_compares_with_mismatched_completions_too_unless_its_loss_has_no_baseline(composed):
    compose(composed, "kto")
    assert composed.configs["kto/data"].kind == "unpaired"
    assert composed.roles("kto") == {"model": "sft", "data": "kto/data", "reference_logps": "kto/reference-logps"}
    wanted = {"bf16": False, "max_steps": None, "batch_size": 0, "order": 0, "completions": ("completion",)}
    assert composed.configs["kto/reference-logps"].model_dump() == {**wanted, "mismatched": True}
    compose(composed, "kto", kto={**PAIRS, "loss": {"loss_type": "apo_zero_unpaired"}})
    assert composed.configs["kto/reference-logps"].model_dump() == wanted
    compose(composed, "dpo")
    del wanted["completions"]
    assert composed.configs["dpo/reference-logps"].model_dump() == wanted, "as its key has it"


@pytest.mark.parametrize(("reference", "second"), [("initial", "sft"), ("previous", "round-1/dpo")])
def test_the_reference_of_a_round_is_the_policy_before_it_or_the_initial_policy(composed, reference, second):
    section = {**ROUNDS, "rounds": 2, "reference": reference, "training": {"max_steps": 1}}
    compose(composed, "iterative-dpo", iterative_dpo=section)
    assert composed.roles("round-1/reference-logps") == {"model": "sft", "data": "round-1/select"}
    assert composed.roles("round-2/reference-logps") == {"model": second, "data": "round-2/select"}
    assert composed.roles("round-2/dpo")["reference_logps"] == "round-2/reference-logps"
    orders = [composed.configs[f"round-{number}/reference-logps"].order for number in (1, 2)]
    assert orders[0] != orders[1], "rounds take their rows in different orders"


def test_a_policy_may_be_evaluated_by_other_rewards_than_in_training(composed):
    compose(composed, "sft", evaluation={**EVALUATION, "rewards": REWARDS[:2]})
    assert composed.roles("sft/evaluation/score")["reward-1"] == "evaluation/reward-1"
    compose(composed, "rl", evaluation={**EVALUATION, "rewards": REWARDS}, reward_model=PAIRS)
    assert composed.roles("rl/evaluation/score")["reward-2"] == "reward-model"
    assert not {role for role in composed.roles("rl") if role.startswith("reward")}


def model(store: Store, folder: Path, name: str, tokenizer: str = "bytes") -> Reference:
    (folder / name).mkdir()
    (folder / name / "weights").write_text(name)
    (folder / name / "tokenizer.json").write_text(tokenizer)
    return store.publish(folder / name, "model")


@pytest.fixture
def compared(composed: Composed, tmp_path: Path) -> Any:
    """Compose SFT, set its resulting policy, and compare that with the tagged model."""

    def run(candidate: Reference, **fields: Any) -> Any:
        outputs = compose(composed, "sft", promotion=GATES, **fields)
        composed.artifacts = {
            "sft": candidate,
            "model": composed.artifacts.get("model") or model(composed.store, tmp_path, "base"),
        }
        composed.inputs.clear()
        return compare(outputs.evaluations.recipe, composed.store, outputs)

    return run


def move(store: Store, to: Reference) -> None:
    store.tags.move("policy/production", to, store.tags.get("policy/production"), reason="better")


def test_a_gate_compares_with_the_policy_of_the_tag_on_the_same_prompts(composed, compared, tmp_path):
    production, candidate = (model(composed.store, tmp_path, name) for name in ("production", "candidate"))
    first = compared(candidate)
    assert (first.expected, first.final, first.baseline) == (None, "sft", "start")  # nothing is there to replace
    assert composed.inputs == {}
    move(composed.store, production)
    comparison = compared(candidate)
    assert (comparison.expected, comparison.final, comparison.baseline) == (
        production,
        "sft against production",
        "production",
    )
    sampled = composed.roles("production/evaluation/generate")
    assert sampled == {"policy": str(production), "prompts": "evaluation/prompts"}
    assert composed.roles("sft/evaluation/against-production") == {
        "scores": "sft/evaluation/score",
        "baseline_scores": "production/evaluation/score",
        "prompts": "evaluation/prompts",
        "rollouts": "sft/evaluation/generate",
        "baseline_rollouts": "production/evaluation/generate",
    }
    assert (
        composed.roles("production/evaluation/score")["reference"] == "model"
    )  # KL is to the run's own start, as ever
    report = composed.roles("promotion/report")
    assert {"start", "sft", "production", "sft against production", "overlap"} == report.keys()
    config = composed.configs["promotion/report"]
    assert (config.baseline, config.against) == ("start", {"sft against production": "production"})


def test_production_is_judged_by_the_same_rewards(composed, compared, tmp_path):
    move(composed.store, model(composed.store, tmp_path, "production"))
    compared(model(composed.store, tmp_path, "candidate"), evaluation={**EVALUATION, "rewards": REWARDS[:2]})
    roles = composed.roles("production/evaluation/score")
    assert (roles["reward-1"], roles["tokenizer"]) == (
        "evaluation/reward-1",
        str(composed.store.tags.get("policy/production")),
    )


def test_present_earlier_and_initial_policies_of_the_tag_are_not_evaluated_again(composed, compared, tmp_path):
    first, second = (model(composed.store, tmp_path, name) for name in ("first", "second"))
    move(composed.store, first)
    assert compared(first).baseline == "start"
    move(composed.store, second)
    assert compared(first).expected == second
    assert composed.inputs == {}
    composed.artifacts["model"] = second
    assert compared(model(composed.store, tmp_path, "third")).baseline == "start"
    assert composed.inputs == {}


def test_another_tokenizer_cannot_be_compared(composed, compared, tmp_path):
    move(composed.store, model(composed.store, tmp_path, "production", tokenizer="words"))
    comparison = compared(model(composed.store, tmp_path, "candidate"))
    assert "of another kind or with another tokenizer" in comparison.problem
    assert composed.inputs == {}


@pytest.mark.parametrize("chat_template", [None, "plain"])
def test_evaluated_policies_have_their_own_chat_template_unless_the_recipe_sets_one(composed, chat_template):
    evaluation = {**EVALUATION, "prompts": {**TASK, "chat_template": chat_template}}
    compose(composed, "iterative-dpo", evaluation=evaluation)
    own = {label for label, config in composed.configs.items() if getattr(config, "own_template", False)}
    evaluated = {label for label in composed.configs if label.endswith("evaluation/generate")}
    assert len(evaluated) > 1
    assert own == (set() if chat_template else evaluated), (
        "and those that are sampled for training have that of the data"
    )


def test_production_that_cannot_be_sampled_on_the_prompts_cannot_be_compared(composed, compared, tmp_path):
    """The run goes on with its own results, unless the cause lies in this machine: then a later attempt compares the two."""
    move(composed.store, model(composed.store, tmp_path, "production"))
    candidate = model(composed.store, tmp_path, "candidate")
    refused = "rows.jsonl:2: the prompt cannot be rendered"
    composed.failures["production/evaluation/generate"] = UserError(refused)
    comparison = compared(candidate)
    assert f"which cannot be sampled on the prompts of this run: {refused}" in comparison.problem
    assert (comparison.final, comparison.baseline, comparison.report.label) == ("sft", "start", "report")
    assert comparison.failed == "production/evaluation/generate", (
        "the outcome has it as the reason, not as a failed branch"
    )
    assert "promotion/report" not in composed.inputs
    composed.failures["production/evaluation/generate"] = EnvironmentFault("no GPU is left")
    with pytest.raises(EnvironmentFault, match="no GPU is left"):
        compared(candidate)


def test_a_night_refuses_production_in_another_chat_template_than_its_rows_have(composed, tmp_path):
    """Its candidate would be trained in one and sampled in the other."""
    models = {}
    thinking = CHAT_TEMPLATE.replace("'<assistant>'", "'<assistant><think>'")
    assert thinking != CHAT_TEMPLATE
    templates = {
        "base": None,
        "same": CHAT_TEMPLATE + "{# a comment #}",
        "other": "<q>" + CHAT_TEMPLATE,
        "prompt": thinking,
    }
    for name, template in templates.items():
        byte_tokenizer(template).save_pretrained(tmp_path / name)
        models[name] = composed.store.publish(tmp_path / name, "model")
    composed.artifacts["model"] = models["base"]
    content: dict[str, Any] = {"name": "nights", "model": MODEL, "evaluation": EVALUATION, "promotion": GATES}
    rows: Any = SimpleNamespace(label="arrived")

    def night(production: Reference, **data: Any) -> None:
        content["dpo"] = {"data": {"path": str(tmp_path / "arrives.jsonl"), **data}}
        nightly.compose_night(parse_recipe({"method": "nightly", **content}), production, rows, number=0)  # type: ignore[arg-type]

    night(models["same"])
    with pytest.raises(
        UserError, match=r"train further .* has another chat template than .*: name a model with production's"
    ):
        night(models["other"])
    with pytest.raises(UserError, match="another chat template"):
        night(models["prompt"])
    night(models["other"], chat_template="plain")


@pytest.mark.parametrize(("tagged", "baseline"), [(True, "production"), (False, "start")])
def test_a_night_is_compared_with_production_or_else_with_its_start(composed, tmp_path, tagged, baseline):
    content: dict[str, Any] = {"name": "nights", "model": MODEL, "evaluation": EVALUATION, "promotion": GATES}
    content["dpo"] = {"data": str(tmp_path / "arrives.jsonl")}
    arrived: Any = SimpleNamespace(label="arrived")
    production = model(composed.store, tmp_path, "production") if tagged else None
    composed.artifacts["model"] = model(composed.store, tmp_path, "base")
    content["iterative_dpo"] = {**ROUNDS, "rewards": REWARDS[:2]}
    outputs = nightly.compose_night(parse_recipe({"method": "nightly", **content}), production, arrived, number=0)  # type: ignore[arg-type]
    assert composed.roles("round-1/score")["reward-1"] == "rounds/reward-1"
    assert outputs.baseline == composed.configs["report"].baseline == baseline
    assert composed.configs["report"].policies == (baseline, "candidate")
    # Drift is measured from the recipe's model: in the first night it is the baseline, whose scores have that KL already.
    to_origin = composed.roles("candidate/evaluation")["scores_to_origin"]
    assert to_origin == ("candidate/evaluation/drift" if tagged else "candidate/evaluation/score")
    if tagged:
        roles = composed.roles("candidate/evaluation/drift")
        assert (roles["rollouts"], roles["reference"]) == ("candidate/evaluation/generate", "model")
        assert composed.roles("candidate/evaluation/score")["reference"] == str(production)
        assert composed.configs["candidate/evaluation/drift"].verifier is None
    assert "scores_to_origin" not in composed.roles(f"{baseline}/evaluation")


@pytest.mark.parametrize("name", sorted(for_large_models()))
def test_recipes_for_large_models_are_composed(composed, monkeypatch, name):
    """The Hub is not asked: its commits are made up."""
    for user in ("data.hub", "data.origins.path"):
        monkeypatch.setattr(f"alignment_core.{user}.commit_of", lambda *_: "c")
    recipe = for_large_models()[name].recipe()
    method_of(recipe).compose(recipe)
    assert {"model"} < composed.inputs.keys()
