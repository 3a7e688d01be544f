"""Critic, reference and reward models in processes of their own: the same policy as with all of them beside it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.errors import Stopped, UserError
from alignment_core.execution.base import StageCall
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.recipes import ResourcesConfig, RlConfig
from alignment_core.stages.rl import RlStageConfig
from tests.stages.killing import Killer, store_with
from tests.stages.rl_runs import (
    RESOURCES,
    Section,
    prompts,
    rewards_small_letters,
    rows_of,
    run_rl,
    section_of,
    two_head_model,
)
from tests.training.test_trainer_ranks import greatest_difference

pytestmark = pytest.mark.slow

STEPS = 3
PPO = {
    "advantage": {"estimator": "gae", "whiten": "mean-and-deviation"},
    "critic": {"learning_rate": 1e-3, "freezing_steps": 1, "normalise": True},
}
APART = {"critic": {"gpus": 1}, "reference": {"gpus": 1}}
TOGETHER = {"critic": {"gpus": 1}, "reference": {"colocate_with": "critic"}}
Placed = Callable[..., tuple[dict[str, Path], Any]]


@pytest.fixture
def section(tmp_path: Path) -> Section:
    return section_of(
        STEPS,
        rewards_small_letters(tmp_path),
        generation={"max_completion_length": 6, "shard_size": 2},
        training={"learning_rate": 1e-3, "adam_epsilon": 1e-5, "num_train_epochs": 2},
    )


@pytest.fixture
def run(machines: Any, tiny_model: Any, tmp_path: Path) -> Placed:
    """The stage in the folder ``name``, with one rank for the policy and these ``models``."""

    def run(section: Section, name: str, models: Any = None, **more: Any) -> tuple[dict[str, Path], Any]:
        placed = {"models": models} if models else {}
        resources = ResourcesConfig(**{**RESOURCES.model_dump(exclude_unset=True), "trainers": 1, **placed})
        return run_rl(tmp_path / name, tiny_model(), section, machines, resources, warm=machines(1, **placed), **more)

    return run


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(
            {**PPO, "kl": {"coefficient": 0.1, "place": "loss"}},
            id="PPO with the KL in its loss",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {**PPO, "kl": {"coefficient": 0.1, "place": "reward", "estimator": "k1", "target": 0.01}},
            id="PPO with the KL in its reward",
        ),
        pytest.param(
            {"kl": {"coefficient": 0.1}, "loss": {"top_entropy_quantile": 0.5}},
            id="GRPO on tokens of high entropy",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(PPO, id="without KL", marks=pytest.mark.exhaustive),
    ],
)
def test_models_in_processes_of_their_own_train_the_same_policy(
    algorithm: dict[str, Any], section: Section, run: Placed
) -> None:
    section |= algorithm
    _, beside = run(section, "beside")
    for name, models in {"apart": APART, "together": TOGETHER}.items():
        if "critic" not in algorithm:
            models = {"reference": {"gpus": 1}}
        _, result = run(section, name, models)
        assert result.outputs == beside.outputs, name


def test_a_run_whose_critic_dies_resumes_and_ends_in_the_same_policy(
    section: Section, run: Placed, machines: Any
) -> None:
    section |= {**PPO, "kl": {"coefficient": 0.1}}
    _, whole = run(section, "whole", APART)
    for dies in ("critic", "reference"):
        killer = Killer(machines(1, models=APART), dies, at=2)
        _, killed = run(section, dies, APART, reporter=killer)
        assert killed.cost["restarts"] == 1
        assert killer.done == [0, 1, 2, 2, 3], "it resumed from the checkpoint after step 2"
        assert killed.outputs == whole.outputs


@pytest.mark.exhaustive
@pytest.mark.parametrize("progress", ["local", "store"])
def test_a_stopped_run_resumes_with_its_models_in_another_layout(
    progress: str, section: Section, run: Placed, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """Critic and reference apart until it is stopped after step 1, beside the policy until it is stopped after step 2, and then
    both in another process group."""
    section |= {**PPO, "kl": {"coefficient": 0.1}}
    _, whole = run(section, "whole", APART)
    store, policy, data = store_with(tmp_path / "stopped", tiny_model(), prompts())
    config = RlStageConfig(section=RlConfig.model_validate(section)).model_dump(mode="json")
    call = StageCall(stage="rl", label="rl", config=config, inputs={"policy": policy, "prompts": data})

    def run_in(models: Any, stop_after: int | None) -> tuple[Any, float, float]:
        """The result, None if it was stopped, and the first and the last step that it reported."""
        stopping, seen = threading.Event(), list[float]()

        def report(done: float, total: Any, unit: str, metrics: Any) -> None:
            seen.append(done)
            if done == stop_after:
                stopping.set()

        placed = {"models": models} if models else {}
        resources = ResourcesConfig(
            **{**RESOURCES.model_dump(exclude_unset=True), "trainers": 1, "progress": progress, **placed}
        )
        request = StageRequest(store, call, machines(1, **placed), resources, report, stopping=stopping)
        result = None
        with suppress(Stopped):
            result = run_stage(request)
        return result, min(seen), max(seen)

    assert run_in(APART, stop_after=1) == (None, 0, 1)
    assert run_in(None, stop_after=2) == (None, 1, 2), "it did not start again"
    resumed, *steps = run_in(TOGETHER, stop_after=None)
    assert steps == [2, STEPS]
    assert resumed.outputs == whole.outputs


def test_a_reward_model_in_parts_gives_the_rewards_of_a_whole_one(
    section: Section, run: Placed, tiny_model: Any, tmp_path: Path
) -> None:
    """The second of two, on GPUs of its own."""
    judge = shutil.copytree(tiny_model(), tmp_path / "judge")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).save_pretrained(judge)
    section |= {"steps": 1, "rewards": [{"reward_model": "ours"}, {"reward_model": "ours", "weight": 2.0}]}
    rewards = []
    for name, models in {"whole": None, "parts": {"reward_models": [{}, {"gpus": 2, "zero_stage": 3}]}}.items():
        outputs, _ = run(section, name, models, judges={"reward-0": judge, "reward-1": judge})
        rewards.append([row["reward"] for row in rows_of(outputs)])
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-5)
    assert len(set(rewards[0])) > 6


def test_a_policy_and_a_critic_of_different_stages_train_the_same(section: Section, run: Placed) -> None:
    """ZeRO 3 of one rank is the same arithmetic in another order."""
    section |= {**PPO, "kl": {"coefficient": 0.1}, "steps": 2}
    _, beside = run(section, "beside")
    stages = {"critic": {"zero_stage": 3}, "reference": {"zero_stage": 3, "offload_parameters": True}}
    _, result = run(section, "stages", stages)
    for name in ("reward", "kl", "critic_loss"):
        assert result.metrics[name] == pytest.approx(beside.metrics[name], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": {"lora": {"r": 4}}}, "with `rl.training.lora` the reference is the policy without its adapters"),
        (
            {"kl": {"coefficient": 0.1, "sync_ref_model": {"sync_steps": 2}}},
            "copies the policy's weights into the refer",
        ),
    ],
)
def test_a_reference_that_is_bound_to_the_policy_has_no_gpus_of_its_own(
    changes: dict[str, Any], says: str, section: Section, run: Placed
) -> None:
    training = {**section["training"], **changes.pop("training", {})}
    section |= {"kl": {"coefficient": 0.1}, **changes, "training": training}
    with pytest.raises(UserError, match=says):
        run(section, "refused", {"reference": {"gpus": 1}})


def test_groups_of_ranks_that_compute_together_train_the_same_policy(
    section: Section, run: Placed, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """Each step of policy, critic and reference on two ranks, of which each has a half of the tokens."""
    section |= {**PPO, "kl": {"coefficient": 0.1}, "steps": 2}
    _, alone = run(section, "alone")
    for name, models in {"beside": {}, "apart": {"critic": {"gpus": 2}}}.items():
        of_pairs: dict[str, Any] = {"sequence_parallel_size": 2, **({"models": models} if models else {})}
        resources = ResourcesConfig(**{**RESOURCES.model_dump(exclude_unset=True), "trainers": 2, **of_pairs})
        warm = machines(2, **of_pairs)
        _, result = run_rl(tmp_path / name, tiny_model(), section, machines, resources, warm=warm)
        for metric in ("reward", "kl", "critic_loss"):
            assert result.metrics[metric] == pytest.approx(alone.metrics[metric], rel=1e-4), (name, metric)


@pytest.mark.exhaustive
def test_ranks_that_share_layers_train_the_same_policy(section: Section, machines: Any, tmp_path: Path) -> None:
    """Policy, critic and reference in two parts; the engine gets whole weights, as the policy's next samples show."""
    model = two_head_model(tmp_path / "model")
    section |= {**PPO, "kl": {"coefficient": 0.1}, "steps": 2}
    models = {"critic": {"gpus": 2}, "reference": {"colocate_with": "critic"}}
    results = []
    for name, trainers, placed in (
        ("alone", 1, {}),
        ("beside", 2, {"trainer_tensor_parallel_size": 2}),
        ("apart", 2, {"trainer_tensor_parallel_size": 2, "models": models}),
    ):
        resources = ResourcesConfig(**{**RESOURCES.model_dump(exclude_unset=True), "trainers": trainers, **placed})
        warm = machines(trainers, **placed)
        outputs, result = run_rl(tmp_path / name, model, section, machines, resources, warm=warm)
        results.append((name, [row["completion_ids"] for row in rows_of(outputs)], result.metrics))
    _, sampled, alone = results[0]
    for name, completions, metrics in results[1:]:
        assert completions == sampled, name
        for metric in ("reward", "kl", "critic_loss"):
            assert metrics[metric] == pytest.approx(alone[metric], rel=1e-4), (name, metric)


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


@pytest.mark.exhaustive
def test_a_stopped_run_resumes_on_other_ranks_and_ends_in_the_same_policy(
    section: Section, run: Placed, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """With its progress in the store: two ranks of ZeRO 3 until it is stopped after step 2, and one of ZeRO 1 for the rest."""
    section |= {**PPO, "kl": {"coefficient": 0.1}}
    outputs, whole = run(section, "whole")
    store, policy, data = store_with(tmp_path / "stopped", tiny_model(), prompts())
    config = RlStageConfig(section=RlConfig.model_validate(section)).model_dump(mode="json")
    call = StageCall(stage="rl", label="rl", config=config, inputs={"policy": policy, "prompts": data})
    stopping, seen = threading.Event(), list[float]()

    def run_on(trainers: int, zero_stage: int) -> Any:
        def report(done: float, total: Any, unit: str, metrics: Any) -> None:
            seen.append(done)
            if trainers == 2 and done == 2:
                stopping.set()

        more: Any = {"trainers": trainers, "zero_stage": zero_stage, "progress": "store"}
        resources = RESOURCES.model_copy(update=more)
        return run_stage(StageRequest(store, call, machines(trainers), resources, report, stopping=stopping))

    with pytest.raises(Stopped):
        run_on(2, 3)
    assert max(seen) == 2
    stopping.clear()
    seen.clear()
    resumed = run_on(1, 1)
    assert (min(seen), max(seen)) == (2, STEPS), "it did not start again"
    for name in ("policy", "critic"):
        ours, expected = (weights_of(folder) for folder in (store.fetch(resumed.outputs[name]), outputs[name]))
        assert greatest_difference(ours, expected) < 1e-5, name
    assert greatest_difference(weights_of(tiny_model()), weights_of(outputs["policy"])) > 1e-3
    assert resumed.metrics["reward"] == pytest.approx(whole.metrics["reward"])
