"""Models beside the policy: rewards, judges, references, critics and vision towers, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.estimate import Estimate, estimate
from alignment_core.capacity.hardware import hardware_of
from alignment_core.capacity.report import capacity
from alignment_core.capacity.workload import Lengths, Sampling, Training, models_of, work_of
from tests.capacity.shapes import QWEN_2_5_7B, llama, only_work, ppo, recipe_of

GB = 1e9
SMALL = {**QWEN_2_5_7B, "num_hidden_layers": 2}
BATCH = {"estimator": "batch"}
JUDGE = {"served_judge": "some/judge", "max_tokens": 100, "template": "{completion}" + " " * 388}  # 400 characters


def of_ppo(
    tmp_path: Path,
    resources: dict[str, Any],
    others: dict[str, Architecture | None] | None = None,
    gpus: int = 8,
    **section: Any,
) -> Estimate:
    content = ppo({"zero_stage": 3, **resources})
    recipe = recipe_of(tmp_path, {**content, "rl": {**content["rl"], **section}})
    cluster = Cluster(hardware_of("h100"), gpus, Architecture.of(QWEN_2_5_7B), others=others or {})
    return estimate(only_work(recipe), recipe.resources, cluster)


def test_a_reward_model_and_its_critic_have_a_size_of_their_own(tmp_path: Path) -> None:
    """A critic starts from the reward model. Both have 2 bytes a parameter in the passes of one rank of each."""
    reward = Architecture.of(SMALL)
    apart = {"models": {"critic": {"gpus": 1}, "reward": {"gpus": 1}}}
    result = of_ppo(tmp_path, apart, {"some/reward-model": reward}, gpus=10)
    roles = {role.name: role for role in result.roles}
    assert roles["reward_model"].terms["weights"] == 2 * reward.parameters
    assert roles["critic"].terms["weights"] == 2 * reward.parameters
    assert not any("as large as the policy" in note for note in result.notes)
    unknown = of_ppo(tmp_path, apart, gpus=10)
    assert unknown.notes[0] == (
        "rl.rewards.0: some/reward-model is taken to be as large as the policy, because its config.json was not found"
    )
    assert result.seconds["reward"] < unknown.seconds["reward"] / 4
    unreadable = of_ppo(tmp_path, apart, {"some/reward-model": None}, gpus=10)
    assert unreadable.notes[0] == (
        "rl.rewards.0: some/reward-model is taken to be as large as the policy, because its config.json does not give its "
        "size in fields known here"
    )
    assert unreadable.seconds["reward"] == unknown.seconds["reward"]


def test_several_reward_models_are_on_different_gpus(tmp_path: Path) -> None:
    """Three models with an actor each, on 8 GPUs one on each of three, on 2 GPUs at most two on one."""
    rewards = [{"reward_model": f"some/reward-{number}"} for number in range(3)]
    weights = 2 * Architecture.of(QWEN_2_5_7B).parameters
    for gpus, most in ((8, 1), (2, 2)):
        result = of_ppo(tmp_path, {"trainers": gpus, "engines": gpus}, gpus=gpus, rewards=rewards)
        peak = next(peak for peak in result.peaks if peak.where == "policy" and peak.moment == "training")
        assert peak.parts["reward_model"] == most * weights


def test_each_reward_model_counts_where_it_is_placed(tmp_path: Path) -> None:
    """The first is split over two GPUs of its own, the second has those of the critic, and the third the policy's."""
    rewards = [{"reward_model": f"some/reward-{number}"} for number in range(3)]
    places = [{"gpus": 2, "zero_stage": 3}, {"colocate_with": "critic"}]
    models = {"critic": {"gpus": 2}, "reward_models": places}
    result = of_ppo(tmp_path, {"models": models}, gpus=12, rewards=rewards)
    weights = 2 * Architecture.of(QWEN_2_5_7B).parameters
    parts = {peak.where: peak.parts["reward_model"] for peak in result.peaks if "reward_model" in peak.parts}
    assert parts == pytest.approx({"reward_models.0": weights / 2, "critic": weights, "policy": weights}, rel=0.01)
    alone = of_ppo(tmp_path, {"models": {"critic": {"gpus": 2}}}, gpus=10, rewards=rewards[:1])
    assert result.seconds["reward"] == pytest.approx(alone.seconds["reward"]), (
        "each has an actor, and they compute together"
    )


def test_a_served_judge_holds_its_share_of_the_policys_gpus(tmp_path: Path) -> None:
    """40 % of 80 GB, in every moment; 1,024 completions are read in questions of 400 / 4 + 2,048 tokens."""
    judge = Architecture.of(SMALL)
    result = of_ppo(tmp_path, {}, {"some/judge": judge}, rewards=[JUDGE], critic=None, advantage=BATCH)
    moments = {peak.moment: peak for peak in result.peaks if peak.where == "policy"}
    assert {"training", "weight transfer", "sampling"} == moments.keys()
    assert all(peak.parts["served_judge"] / GB == pytest.approx(32) for peak in moments.values())
    cluster = Cluster(hardware_of("h100"), 8, judge)
    assert result.seconds["reward"] == pytest.approx(
        cluster.timing.sampling(1024, 2148, 1024, 100, engines=1, shards=1, at_once=32)
    )
    too_large = of_ppo(tmp_path, {}, {"some/judge": llama("70B")}, rewards=[JUDGE], critic=None, advantage=BATCH)
    assert any(problem.startswith("rl.rewards.0: the server of the judge needs ") for problem in too_large.problems)


def test_what_rewards_elsewhere_take_is_named(tmp_path: Path) -> None:
    rewards = [{"judge": "http://127.0.0.1:8000/v1", "judge_model": "large"}, {"verifier": "math"}]
    result = of_ppo(
        tmp_path, {}, rewards=rewards, critic=None, advantage=BATCH, best={"prompts": {"path": "some/rows"}}
    )
    assert result.notes == (
        "rl.rewards.0: a judge behind an endpoint has machines of its own, and its time is not counted",
        "rl.rewards.1: the time of functions is not counted",
        "rl.best: evaluation during training is not counted",
    )


def test_a_policy_with_adapters_is_its_own_reference(tmp_path: Path) -> None:
    """No second model, but a second pass."""
    lora = {"batch_size": 1024, "bf16": True, "lora": {}}
    kl = {"coefficient": 0.01, "place": "loss"}
    alone = of_ppo(tmp_path, {}, critic=None, advantage=BATCH, kl={"coefficient": 0.0}, training=lora)
    compared = of_ppo(tmp_path, {}, critic=None, advantage=BATCH, kl=kl, training=lora)
    assert "reference" not in {role.name for role in compared.roles}
    assert "logps" not in alone.seconds
    assert compared.seconds["logps"] > 0
    another = of_ppo(tmp_path, {}, critic=None, advantage=BATCH, kl={**kl, "reference": "some/other"}, training=lora)
    assert "reference" in {role.name for role in another.roles}


def test_models_with_gpus_of_their_own_do_not_rest(tmp_path: Path) -> None:
    result = of_ppo(tmp_path, {"models": {"critic": {"gpus": 2}}}, gpus=10)
    host = {role.name: role.host for role in result.roles}
    resident = {role.name: role.resident for role in result.roles}
    assert host["critic"] == 0
    assert host["policy"] == pytest.approx(resident["policy"])
    assert result.seconds["rest"] == pytest.approx(2 * (resident["policy"] + resident["reference"]) / 20e9)


def test_pairs_are_computed_with_their_prompt_once(tmp_path: Path) -> None:
    """Two sequences of 600 tokens, of which the first 400 are the prompt: 800 tokens of a pair."""
    pairs = preferences(tmp_path, {}, Lengths(prompt=400, row=600, rows=6400))
    assert pairs.tokens == {"train_tokens": 64 * 800}
    apart = preferences(tmp_path, {}, Lengths(prompt=400, row=600, rows=6400), {"attention": "sdpa"})
    assert apart.tokens == {"train_tokens": 64 * 1200}


def test_the_reference_of_pairs_is_computed_once_in_each_step_or_not_at_all(tmp_path: Path) -> None:
    lengths = Lengths(prompt=400, row=600, rows=6400)
    fixed = preferences(tmp_path, {}, lengths)
    two_epochs = preferences(tmp_path, {}, lengths, epochs=2)
    assert fixed.once == two_epochs.once > 0
    free = preferences(tmp_path, {"loss_type": "simpo"}, lengths)
    assert free.once == 0
    moving = preferences(tmp_path, {"sync_ref_model": {}}, lengths)
    assert moving.once == 0
    assert moving.seconds["reference"] == pytest.approx(fixed.once / 100)
    assert {role.name for role in moving.roles} == {"policy", "reference"}


def preferences(
    tmp_path: Path, loss: dict[str, Any], lengths: Lengths, resources: dict[str, Any] | None = None, epochs: int = 1
) -> Estimate:
    section = {
        "data": {"path": "some/pairs"},
        "loss": loss,
        "training": {"bf16": True, "batch_size": 64, "num_train_epochs": epochs},
    }
    recipe = recipe_of(tmp_path, {"method": "dpo", "dpo": section, "resources": {"zero_stage": 3, **(resources or {})}})
    cluster = Cluster(hardware_of("h100"), 8, Architecture.of(QWEN_2_5_7B))
    return estimate(only_work(recipe, lengths), recipe.resources, cluster)


def test_completions_of_rounds_are_scored(tmp_path: Path) -> None:
    content = {
        "method": "rejection-sampling",
        "rejection_sampling": {
            "prompts": {"path": "some/prompts"},
            "prompts_per_round": 100,
            "rounds": 1,
            "rewards": [{"reward_model": "some/reward-model"}],
        },
    }
    recipe = recipe_of(tmp_path, content)
    works = work_of(recipe, Lengths(prompt=100, completion=200))
    assert [type(work) for work in works] == [Sampling, Training]
    assert {field: model.name for field, model in models_of(works).items()} == {
        "rejection_sampling.rewards.0": "some/reward-model"
    }
    cluster = Cluster(hardware_of("h100"), 8, Architecture.of(QWEN_2_5_7B))
    result = estimate(works[0], recipe.resources, cluster)
    tokens = 100 * 100 + 400 * 200  # four completions of a prompt, which is computed once
    assert result.seconds["reward"] == pytest.approx(cluster.timing.forward(tokens, 150, 8))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_the_vision_tower_is_that_of_transformers(family: str) -> None:
    """The default configurations, without projector and merger: within a twentieth."""
    config = {"qwen2_5_vl": transformers.Qwen2_5_VLConfig, "llava": transformers.LlavaConfig}[family]()
    with torch.device("meta"):
        tower = transformers.AutoModel.from_config(config.vision_config)
    count = sum(size.numel() for name, size in tower.named_parameters() if "merger" not in name)
    shape = {**QWEN_2_5_7B, "vision_config": config.vision_config.to_dict()}
    assert Architecture.of(shape).tower == pytest.approx(count, rel=0.05)


def test_sides_of_patches_may_be_a_list_and_layers_of_several_sizes_are_not_counted() -> None:
    """InternVL writes both sides. By hand: 2 layers of 4·64² + 2·64·256, and patches of 3·14·14 numbers for each of 64."""
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
    for side in (14, [14, 14]):
        shape = {**QWEN_2_5_7B, "vision_config": {**vision, "patch_size": side}}
        assert Architecture.of(shape).tower == 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 3 * 14 * 14
    assert Architecture.of({**QWEN_2_5_7B, "vision_config": {"embed_dim": [96, 192], "depth": [2, 2]}}).tower == 0


def test_embeddings_may_be_tied_beside_the_language_models_fields() -> None:
    """One embedding less than if they are not tied."""
    language = {name: value for name, value in QWEN_2_5_7B.items() if name != "tie_word_embeddings"}
    tied, untied = (Architecture.of({"tie_word_embeddings": tied, "text_config": language}) for tied in (True, False))
    assert untied.parameters - tied.parameters == 152064 * 3584
    assert (tied.embedding, untied.embedding) == (0, 152064 * 3584)


def test_a_vision_tower_is_beside_the_parameters_of_a_rank(tmp_path: Path) -> None:
    """632M parameters in 2 bytes each: frozen in bf16 on each GPU, and in the engine, too."""
    vision = {"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "hidden_act": "silu", "patch_size": 14}
    model, plain = (Architecture.of({**QWEN_2_5_7B, **more}) for more in ({"vision_config": vision}, {}))
    content = ppo({"zero_stage": 2})
    recipe = recipe_of(tmp_path, content)
    results = [
        estimate(only_work(recipe), recipe.resources, Cluster(hardware_of("h100"), 8, each)) for each in (model, plain)
    ]
    weights = [{role.name: role.terms["weights"] for role in result.roles} for result in results]
    for name in ("policy", "critic", "reference", "engines"):
        assert weights[0][name] - weights[1][name] == 2 * model.tower, name
    assert any("vision tower" in note for note in results[0].notes)


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        ({"trainer_tensor_parallel_size": 8}, "its 28 attention heads cannot be shared evenly by 8 ranks"),
        ({"sequence_parallel_size": 8}, "its 28 attention heads cannot be shared by 8 ranks"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_a_problem(
    resources: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    content = {"method": "sft", "sft": {"data": {"path": "some/rows"}, "training": {"bf16": True}}}
    recipe = recipe_of(tmp_path, {**content, "resources": resources})
    works = work_of(recipe, Lengths(row=512))
    result = capacity(works, recipe.resources, Cluster(hardware_of("h100"), 8, Architecture.of(QWEN_2_5_7B)))
    assert sentence in result.problems[0]
