"""Fields that have another name than in an earlier version: old recipes, `--set`, sweeps and stored recipes stay valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.errors import UserError
from alignment_core.recipes import base, load_recipe, parse_recipe, reference
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig, PolicyLossConfig

OLD: dict[str, Any] = {
    "method": "rl",
    "name": "old",
    "model": "some/model",
    "rl": {
        "prompts": "prompts.jsonl",
        "rewards": [{"verifier": "math"}],
        "advantage": {"estimator": "gae"},
        "critic": {"clip": 0.1, "steps_ahead": 3},
        "loss": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3, "entropy_bonus": 0.01},
        "kl": {"coefficient": 0.1, "refresh_every": 50},
        "mismatch": {"correction": "mask", "high": 3.0},
    },
}
NEW: dict[str, Any] = {
    **OLD,
    "rl": {
        "prompts": "prompts.jsonl",
        "rewards": [{"verifier": "math"}],
        "advantage": {"estimator": "gae"},
        "critic": {"value_clip": 0.1, "freezing_steps": 3},
        "loss": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 3, "entropy_coef": 0.01},
        "kl": {"coefficient": 0.1, "sync_ref_model": {"mixup_alpha": 1.0, "sync_steps": 50}},
        "importance_sampling_correction": {"mode": "mask", "high": 3.0},
    },
}


@pytest.fixture(autouse=True)
def not_yet_warned() -> None:
    base._warn_of_old_name.cache_clear()


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_recipe_with_old_names_is_the_one_with_new_names_and_warns_once(tmp_path: Path, caplog: Any) -> None:
    recipe = load_recipe(written(tmp_path, OLD))
    again = load_recipe(written(tmp_path, OLD))
    assert recipe == again == load_recipe(written(tmp_path, NEW))
    sentences = [record.getMessage() for record in caplog.records]
    assert len(sentences) == len(set(sentences)) == 9
    assert any("`steps_ahead` of a recipe is now called `freezing_steps`" in sentence for sentence in sentences)


def test_a_stored_recipe_with_old_names_is_read_silently(caplog: Any) -> None:
    assert parse_recipe(OLD) == parse_recipe(NEW)
    assert not caplog.records


def test_the_name_that_trl_gives_the_parameters_of_lora_is_read_and_warned_about(tmp_path: Path, caplog: Any) -> None:
    names = ["experts.down_proj"]
    recipes = []
    for name in ("lora_target_parameters", "target_parameters"):
        sft = {"data": "rows.jsonl", "training": {"lora": {name: names}}}
        recipes.append(
            load_recipe(written(tmp_path, {"method": "sft", "name": "x", "model": "some/model", "sft": sft}))
        )
    assert recipes[0] == recipes[1]
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning.startswith("`lora_target_parameters` of a recipe is now called `target_parameters`: rename it")


def test_a_field_by_both_of_its_names_is_refused() -> None:
    with pytest.raises(UserError, match=r"rl\.loss: `clip_low` is the old name of `epsilon`, and both are set: remove"):
        parse_recipe({**NEW, "rl": {**NEW["rl"], "loss": {"epsilon": 0.1, "clip_low": 0.1}}})


@pytest.mark.parametrize("content", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rl.critic.steps_ahead=7", "critic.freezing_steps", 7),
        ("rl.critic.freezing_steps=7", "critic.freezing_steps", 7),
        ("rl.mismatch.low=0.5", "importance_sampling_correction.low", 0.5),
        ("rl.mismatch.correction=clip", "importance_sampling_correction.mode", "clip"),
        ("rl.importance_sampling_correction.mode=clip", "importance_sampling_correction.mode", "clip"),
        ("rl.kl.refresh_every=9", "kl.sync_ref_model.sync_steps", 9),
        ("rl.loss.clip_high=0.5", "loss.epsilon_high", 0.5),
    ],
)
def test_set_replaces_a_field_by_whichever_name_the_file_has_it(
    tmp_path: Path, content: dict[str, Any], override: str, path: str, value: object
) -> None:
    recipe: Any = load_recipe(written(tmp_path, content), [override])
    section = recipe.rl
    assert section.importance_sampling_correction.high == 3.0, "other fields of a renamed section stay"
    for name in path.split("."):
        section = getattr(section, name)
    assert section == value


def test_a_sweep_takes_old_paths_over_a_base_with_new_names(tmp_path: Path) -> None:
    content = {**NEW, "evaluation": {"prompts": "held-out.jsonl", "verifier": "math"}}
    for path in ("rl.critic.steps_ahead", "rl.critic.freezing_steps"):
        sweep: Any = load_recipe(written(tmp_path, content), sweeps=[f"{path}=1,2"])
        variants: list[Any] = [*sweep.variants.values()]
        assert [variant.rl.critic.freezing_steps for variant in variants] == [1, 2]


def test_values_have_the_form_of_the_present_field() -> None:
    """CISPO's upper bound counted from 1 and is now the weight itself, as in TRL; `clip_high` was 0.2 beside any `clip_low`."""
    assert PolicyLossConfig.model_validate({"loss_type": "cispo", "clip_high": 4.0}).bounds == (0.0, 5.0)
    assert PolicyLossConfig.model_validate({"clip_low": 0.1}).bounds == (0.9, 1.2)
    assert PolicyLossConfig.model_validate({"clip_low": 0.1, "epsilon_high": 0.3}).bounds == (0.9, 1.3)
    assert PolicyLossConfig.model_validate({"loss_type": "gspo", "clip_low": 1e-3}).epsilon_high == 4e-4
    assert AdvantageConfig.model_validate({"divide_by_deviation": True}).scale_rewards == "group"
    assert AdvantageConfig.model_validate({"divide_by_deviation": False}).scale_rewards == "none"
    assert KlConfig.model_validate({"refresh_every": None}).sync_ref_model is None


@pytest.mark.parametrize(
    ("section", "fields", "named"),
    [
        ("loss", {"loss_type": "cispo", "clip_high": "much"}, "rl.loss.epsilon_high"),
        ("advantage", {"divide_by_deviation": "perhaps"}, "rl.advantage.scale_rewards"),
        ("kl", {"coefficient": 0.1, "refresh_every": 0}, "rl.kl.sync_ref_model.sync_steps"),
    ],
)
def test_a_wrong_value_by_an_old_name_names_the_present_field(section: str, fields: dict[str, Any], named: str) -> None:
    plain = {"prompts": "prompts.jsonl", "rewards": [{"verifier": "math"}], section: fields}
    with pytest.raises(UserError, match=named):
        parse_recipe({**OLD, "rl": plain})


def test_the_reference_of_fields_shows_the_present_name() -> None:
    assert [field.name for field in reference.at("rl.loss.clip_low")[1]] == ["epsilon"]
    assert reference.at("rl.mismatch.correction")[1][0].name == "mode"
    assert reference.default_at("rl.critic.steps_ahead") == 0
