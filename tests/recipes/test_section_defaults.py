"""Defaults that depend on the place of a section, or on another field: also where other fields of the section are set."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.errors import UserError
from alignment_core.recipes import DataConfig, DpoConfig, DpoLossConfig, RlConfig, TrainingConfig, parse_recipe
from alignment_core.recipes.base import REFUSE_UNUSED, Config
from alignment_core.recipes.reference import default_at, sections
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.recipes.sections.rl import AdvantageConfig, CriticConfig

PROMPTS = {"task": "first", "rows": 8}
PAIRS = {"dpo": {"data": "pairs.jsonl"}}
RL = {"rl": {"prompts": PROMPTS, "rewards": [{"verifier": "task"}]}}


def parsed(method: str, content: dict[str, Any], *changes: tuple[str, Any]) -> Any:
    """A recipe of ``method`` whose fields at dotted paths are set."""
    recipe: dict[str, Any] = {"method": method, "name": "a", "model": "some/model", **content}
    for path, value in changes:
        *above, name = path.split(".")
        node = recipe
        for step in above:
            node[step] = dict(node.get(step, {}))
            node = node[step]
        node[name] = value
    return parse_recipe(recipe)


def test_a_section_that_is_partly_set_keeps_the_defaults_of_its_place() -> None:
    """DPO: 1e-6, as TRL's DPOConfig; SFT's is 1e-5. RL: 256 completions and 1e-6, as in OpenRLHF's scripts."""
    assert parsed("dpo", PAIRS, ("dpo.training.max_steps", 9)).dpo.training.learning_rate == 1e-6
    assert parsed("dpo", PAIRS, ("dpo.training", {})).dpo.training.learning_rate == 1e-6
    rl = parsed("rl", RL, ("rl.training.warmup_ratio", 0.1)).rl.training
    assert (rl.learning_rate, rl.batch_size, rl.warmup_ratio) == (1e-6, 256, 0.1)
    batch = {"generate": {"prompts": "p.jsonl"}}
    assert parsed("generate", batch, ("generate.generation.temperature", 0.5)).generate.generation.num_generations == 1
    assert parsed("dpo", PAIRS, ("dpo.training.learning_rate", 1e-5)).dpo.training.learning_rate == 1e-5


def test_a_field_leaves_out_the_default_of_the_field_that_it_replaces() -> None:
    class Place(Config):
        training: TrainingConfig = TrainingConfig(warmup_ratio=0.03, learning_rate=1e-6)

    place = Place.model_validate({"training": {"warmup_steps": 5}}).training
    assert (place.warmup_steps, place.warmup_ratio, place.learning_rate) == (5, 0.0, 1e-6)
    assert Place.model_validate({"training": TrainingConfig(warmup_steps=5)}).training.warmup_ratio == 0.0
    assert Place.model_validate({"training": {"max_steps": 9}}).training.warmup_ratio == 0.03


def test_passes_over_the_completions_of_a_step_are_whole() -> None:
    with pytest.raises(
        UserError, match=r"`rl.training.num_train_epochs` 1.5 counts passes over the completions of a step"
    ):
        parsed("rl", RL, ("rl.training.num_train_epochs", 1.5))
    assert parsed("rl", RL, ("rl.training.num_train_epochs", 2.0)).rl.training.num_train_epochs == 2


MODEL = {"name": "some/judge"}
PPO = (("rl.advantage.estimator", "gae"), ("rl.critic", {}))


def test_reinforcement_learning_samples_as_many_completions_as_trl() -> None:
    """TRL 1.16's GRPOConfig: num_generations 8, max_completion_length 512; a step's 512 completions are whole batches."""
    rl = parsed("rl", RL, ("rl.generation.temperature", 0.7)).rl
    assert (rl.generation.num_generations, rl.generation.max_completion_length) == (8, 512)
    assert rl.prompts_per_step * rl.generation.num_generations % rl.training.batch_size == 0
    assert rl.training.warmup_ratio == 0.03, "OpenRLHF's --lr_warmup_ratio"


@pytest.mark.parametrize(
    ("rewards", "coefficient", "with_critic"),
    [
        ([{"verifier": "task"}], 0.0, (1.0, [None])),
        ([{"reward_model": MODEL}], 0.04, (0.95, [(-10, 10)])),
        ([{"reward_model": MODEL, "normalise": "model"}], 0.04, (0.95, [(-10, 10)])),
        ([{"reward_model": MODEL, "normalise": "running"}], 0.04, (0.95, [None])),
        ([{"reward_model": MODEL, "clip": None}], 0.04, (0.95, [None])),
        ([{"reward_model": MODEL, "clip": [-1, 1]}], 0.04, (0.95, [(-1, 1)])),
        ([{"verifier": "task"}, {"reward_model": MODEL}], 0.04, (0.95, [None, (-10, 10)])),
        ([{"process_reward_model": MODEL}], 0.04, (1.0, [None])),
    ],
)
def test_kl_clip_and_lambda_depend_on_the_rewards(
    rewards: list[dict[str, Any]], coefficient: float, with_critic: tuple[float, list[Any]]
) -> None:
    """0.04: DeepSeekMath; −10 and 10: OpenRLHF's --reward.clip_range; λ: TRL's PPO (0.95), and OpenRLHF's --lambd (1)."""
    grpo = parsed("rl", RL, ("rl.rewards", rewards)).rl
    assert grpo.kl.coefficient == coefficient
    assert [reward.clip for reward in grpo.rewards] == [reward.get("clip") and (-1, 1) for reward in rewards]
    ppo = parsed("rl", RL, ("rl.rewards", rewards), *PPO)
    assert (ppo.rl.kl.coefficient, ppo.rl.critic.value_clip) == (coefficient, 0.5)
    assert (ppo.rl.advantage.gae_lambda, [reward.clip for reward in ppo.rl.rewards]) == with_critic
    assert parse_recipe(ppo.model_dump(mode="json"), refuse_unused=True) == ppo, "a stored recipe is read as it was"
    written = ppo.model_dump(mode="json", exclude_unset=True)["rl"]
    assert written["rewards"] == rewards, "they do not count as set"
    assert "kl" not in written
    explicit = parsed(
        "rl", RL, ("rl.rewards", rewards), *PPO, ("rl.kl.coefficient", 0), ("rl.advantage.gae_lambda", 0.9)
    ).rl
    assert (explicit.kl.coefficient, explicit.advantage.gae_lambda) == (0, 0.9)


def test_defaults_by_rewards_hold_for_sections_that_are_made_in_python() -> None:
    made = parsed("rl", RL, ("rl.rewards", [{"reward_model": MODEL}]), *PPO).rl
    again = RlConfig(
        prompts=made.prompts,
        rewards=(CHOICE.validate({"reward_model": MODEL}),),
        critic=CriticConfig(),
        advantage=AdvantageConfig(estimator="gae"),
    )
    assert again == made


def test_the_warm_up_is_that_of_the_methods_recipes() -> None:
    """0.03: OpenRLHF's --lr_warmup_ratio, Tülu 3's SFT; 0.1: DPO of Tülu 3 and of Zephyr."""
    pairs = {"data": "pairs.jsonl"}
    assert parsed("sft", {"sft": pairs}, ("sft.training.max_steps", 9)).sft.training.warmup_ratio == 0.03
    judge = {"reward_model": pairs}
    assert parsed("reward-model", judge).reward_model.training.warmup_ratio == 0.03
    assert parsed("dpo", PAIRS).dpo.training.warmup_ratio == 0.1
    assert parsed("dpo", PAIRS, ("dpo.loss.loss_type", "orpo")).dpo.training.warmup_ratio == 0.1
    steps = parsed("dpo", PAIRS, ("dpo.training.warmup_steps", 5)).dpo.training
    assert (steps.warmup_steps, steps.warmup_ratio) == (5, 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ("none", "token", 2.0)),
        ([("rl.training.bf16", True)], ("mask", "sequence", 3.0)),
        ([("rl.training.bf16", True), ("rl.execution.max_staleness", 1)], ("clip", "token", 2.0)),
        ([("rl.training.bf16", True), ("rl.importance_sampling_correction", {"high": 5})], ("mask", "sequence", 5.0)),
        ([("rl.training.bf16", True), ("rl.importance_sampling_correction", {"mode": "none"})], ("none", "token", 2.0)),
        ([("rl.training.bf16", True), ("rl.importance_sampling_correction", {"mode": "clip"})], ("clip", "token", 2.0)),
        ([("rl.training.bf16", True), ("rl.mismatch", {"correction": "clip"})], ("clip", "token", 2.0)),
        (
            [("rl.training.bf16", True), ("rl.importance_sampling_correction", {"measure": "kl", "high": 0.02})],
            ("mask", "sequence", 0.02),
        ),
    ],
)
def test_engines_in_bf16_are_corrected_as_in_trl(changes: list[Any], expected: tuple[str, str, float]) -> None:
    """TRL 1.16's GRPOConfig: vllm_importance_sampling_mode sequence_mask, vllm_importance_sampling_clip_max 3.0."""
    rl = parsed("rl", RL, *changes)
    correction = rl.rl.importance_sampling_correction
    assert (correction.mode, correction.level, correction.high) == expected
    assert parse_recipe(rl.model_dump(mode="json"), refuse_unused=True) == rl


@pytest.mark.parametrize("rewards", [None, "ours", {"reward_model": "x"}, [None], ["ours"], []])
def test_rewards_of_another_form_get_a_sentence(rewards: Any) -> None:
    with pytest.raises(UserError, match=r"rl\.rewards"):
        parsed("rl", RL, ("rl.rewards", rewards), *PPO)


def test_a_critic_without_its_estimator_gets_the_sentence_about_it() -> None:
    with pytest.raises(UserError, match=r"`rl.critic` and the estimator `gae` need each other"):
        parsed("rl", RL, ("rl.critic", {}))


def critic_of(critic: dict[str, Any], **training: Any) -> TrainingConfig:
    gae = ("rl.advantage.estimator", "gae")
    rl = parsed("rl", RL, gae, ("rl.critic", critic), ("rl.training", training)).rl
    return rl.critic.training_of(rl.training)


def test_unset_fields_of_the_critic_follow_the_policys() -> None:
    policy: dict[str, Any] = {"lr_scheduler_type": "linear", "warmup_ratio": 0.2, "adam_beta2": 0.98, "bf16": True}
    assert (
        critic_of({}, **policy).model_dump()
        == TrainingConfig(**policy, learning_rate=1e-5, batch_size=256).model_dump()
    )
    own: dict[str, Any] = {
        "lr_scheduler_type": "constant",
        "min_lr_ratio": 0.5,
        "weight_decay": 0.1,
        "max_grad_norm": 5,
    }
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5}
    critic = critic_of({**own, **adam, "learning_rate": 2e-6}, **policy).model_dump()
    assert critic.items() >= {**own, **adam, "learning_rate": 2e-6, "warmup_ratio": 0.2, "bf16": True}.items()


def test_a_warm_up_of_the_critic_replaces_that_of_the_policy() -> None:
    steps = critic_of({"warmup_steps": 7}, warmup_ratio=0.2)
    assert (steps.warmup_steps, steps.warmup_ratio) == (7, 0.0)
    none = critic_of({"warmup_ratio": 0}, warmup_steps=9)
    assert (none.warmup_steps, none.warmup_ratio) == (0, 0.0)


@pytest.mark.parametrize(
    ("critic", "training", "sentence"),
    [
        ({"warmup_steps": 7, "warmup_ratio": 0.1}, {}, "`rl.critic.warmup_steps` and `rl.critic.warmup_ratio` exclude"),
        ({"lr_scheduler_type": "wsd", "warmup_ratio": 0.95}, {}, "must not exceed 1 in sum"),
        ({"max_grad_norm": 0}, {}, r"rl\.critic\.max_grad_norm: "),
    ],
)
def test_fields_of_the_critic_that_do_not_fit_are_refused(
    critic: dict[str, Any], training: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        critic_of(critic, **training)


def test_betas_of_a_critic_without_moments_are_refused() -> None:
    rl = {**RL["rl"], "advantage": {"estimator": "gae"}, "training": {"optimizer": "adafactor"}}
    with pytest.raises(ValueError, match=r"`adam_beta1` has no effect in `rl\.critic` with"):
        RlConfig.model_validate({**rl, "critic": {"adam_beta1": 0.8}}, context=REFUSE_UNUSED)


def test_a_critic_that_is_trained_alone_for_all_steps_is_refused() -> None:
    """As by a short trial of a shipped recipe, with `--set rl.steps=10`."""
    rl = {
        "prompts": "p.jsonl",
        "rewards": [{"verifier": "task"}],
        "advantage": {"estimator": "gae"},
        "steps": 10,
        "critic": {"freezing_steps": 10},
    }
    with pytest.raises(ValueError, match=r"`rl\.critic\.freezing_steps` 10 leaves none of `rl\.steps` 10"):
        RlConfig.model_validate(rl, context=REFUSE_UNUSED)
    assert RlConfig.model_validate(rl).steps == 10, "a stored recipe is read as it was"


def test_defaults_of_a_place_are_fields_that_dumps_always_have() -> None:
    """A field that a dump leaves out would have the default of the place when the dump is read."""
    for config in sections():
        assert issubclass(config, Config)
        for name, fields in config._own_sections().items():
            section = type(config.model_fields[name].get_default())
            assert not any(section.model_fields[field].exclude_if for field in fields), f"{config.__name__}.{name}"
        for choices in config.DEFAULTS_BY.values():
            for defaults in choices.values():
                assert not any(config.model_fields[field].exclude_if for field in defaults), config.__name__


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"loss_type": "clip"}, (0.8, 1.2)),
        ({"loss_type": "clip", "epsilon": 0.1}, (0.9, 1.1)),
        ({"loss_type": "gspo"}, (1 - 3e-4, 1 + 4e-4)),
        ({"loss_type": "gspo", "epsilon_high": 5e-4}, (1 - 3e-4, 1 + 5e-4)),
        ({"loss_type": "cispo"}, (0.0, 5.0)),
    ],
)
def test_the_clip_bounds_are_those_of_the_policy_loss(loss: dict[str, Any], expected: tuple[float, float]) -> None:
    """GSPO (Zheng et al. 2025): 3e-4 and 4e-4. CISPO in ScaleRL (Khatri et al. 2025): a weight of at most 5."""
    section = parsed("rl", RL, ("rl.loss", loss)).rl.loss
    assert section.bounds == expected


@pytest.mark.parametrize(
    ("loss", "beta", "margin", "nll", "rate"),
    [
        ({}, 0.1, None, 0.0, 1e-6),
        ({"loss_type": "simpo"}, 2.0, 1.0, 0.0, 1e-6),
        ({"loss_type": "simpo", "beta": 10}, 10.0, 5.0, 0.0, 1e-6),
        ({"loss_type": "simpo", "simpo_gamma": 0.5}, 2.0, 0.5, 0.0, 1e-6),
        ({"loss_type": "cpo"}, 0.1, None, 1.0, 1e-6),
        ({"loss_type": "orpo"}, 0.1, None, 1.0, 8e-6),
    ],
)
def test_a_preference_loss_has_the_constants_of_its_paper(
    loss: dict[str, Any], beta: float, margin: float | None, nll: float, rate: float
) -> None:
    for recipe in (
        parsed("dpo", PAIRS, ("dpo.loss", loss)),
        parsed("dpo", PAIRS, ("dpo.loss", loss), ("dpo.training.max_steps", 9)),
    ):
        section = recipe.dpo
        assert (section.loss.beta, section.loss.nll_weight, section.training.learning_rate) == (beta, nll, rate)
        assert margin is None or section.loss.target_margin == margin
        again = parse_recipe(recipe.model_dump(mode="json"))
        assert again == recipe, "a stored recipe is read as it was"


def test_filled_defaults_do_not_count_as_set() -> None:
    """So they change with the field on which they depend, where a recipe is written down and read with another value."""
    gspo = parsed("rl", RL, ("rl.loss.loss_type", "gspo"), ("rl.training", {"warmup_ratio": 0.1}))
    written = gspo.model_dump(exclude_unset=True)
    assert (written["rl"]["loss"], written["rl"]["training"]) == ({"loss_type": "gspo"}, {"warmup_ratio": 0.1})
    orpo = parsed("dpo", PAIRS, ("dpo.loss.loss_type", "orpo")).model_dump(exclude_unset=True)["dpo"]
    assert (orpo["loss"], orpo.get("training")) == ({"loss_type": "orpo"}, None)


def test_variants_of_a_stored_sweep_have_the_defaults_of_their_losses() -> None:
    base = {"method": "rl", **RL, "rl": {**RL["rl"], "loss": {"loss_type": "gspo"}}}
    evaluation = {"prompts": PROMPTS, "verifier": "task"}
    content = {"method": "sweep", "name": "a", "model": "some/model", "base": base, "evaluation": evaluation}
    first: Any = parse_recipe({**content, "sweep": {"rl.loss.loss_type": ["gspo", "cispo", "clip"]}})
    again: Any = parse_recipe(first.model_dump(mode="json", exclude_unset=True), refuse_unused=True)
    for sweep in (first, again):
        clips = [one.rl.loss.bounds for one in sweep.variants.values()]
        assert clips == [(1 - 3e-4, 1 + 4e-4), (0.0, 5.0), (0.8, 1.2)]


def test_sections_that_are_made_in_python_are_filled_too() -> None:
    data = DataConfig.model_validate("pairs.jsonl")
    assert DpoConfig(data=data, training=TrainingConfig(max_steps=9)).training.learning_rate == 1e-6
    assert DpoConfig(data=data, loss=DpoLossConfig(loss_type="orpo")).training.learning_rate == 8e-6
    assert DpoConfig(data=data, training=TrainingConfig(learning_rate=1e-5)).training.learning_rate == 1e-5


@pytest.mark.parametrize("value", [["simpo"], {"a": 1}, None])
def test_a_loss_that_is_no_name_gets_a_sentence(value: Any) -> None:
    for method, content, field in (("dpo", PAIRS, "dpo.loss.loss_type"), ("rl", RL, "rl.loss.loss_type")):
        with pytest.raises(UserError, match=field):
            parsed(method, content, (field, value))


def test_a_learning_rate_that_is_set_holds_with_every_loss() -> None:
    orpo = parsed("dpo", PAIRS, ("dpo.loss.loss_type", "orpo"), ("dpo.training.learning_rate", 5e-6))
    assert orpo.dpo.training.learning_rate == 5e-6


def test_the_default_of_a_field_is_that_of_its_place() -> None:
    assert default_at("sft.training.learning_rate") == 1e-5
    assert default_at("dpo.training.learning_rate") == 1e-6
    assert default_at("process_reward_model.training.learning_rate") == 1e-6
    assert default_at("rl.training.batch_size") == 256
    assert default_at("dpo.loss.beta") == 0.1
