"""The rl stage with real trainers and a real engine: the same policy despite killed actors, with every algorithm."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.artifacts import Reference, open_store
from alignment_core.artifacts.attachments import attachment
from alignment_core.artifacts.reference import MASTERS
from alignment_core.data.messages import user
from alignment_core.environments.episode import version_of
from alignment_core.errors import DataError, NumericError, UserError
from alignment_core.execution.curve import CURVE, Curve
from alignment_core.inference.engine import Engine
from alignment_core.models.loading import load_model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.stages.rl.weights import WeightSync
from tests.rewards.other_tokenizer import rendered, reward_model_with_another_tokenizer, score_of
from tests.rewards.reward_server import Server, lengths
from tests.stages.conftest import RunRl
from tests.stages.killing import Killer
from tests.stages.rl_runs import Section, prompts, rows_of, section_of, steps_of

pytestmark = pytest.mark.slow

STEPS = 4
LETTERS = """
def share_of_small_letters(prompt, completion, label):
    return sum(c.islower() for c in completion) / max(1, len(completion))
"""
FAILS = """
calls = 0

def now_and_then(prompt, completion, label):
    global calls
    calls += 1
    if calls % 4 == 0:
        raise ValueError("cannot judge that")
    return len(completion) / 100
"""

GROUP = """
import asyncio

async def against_the_mean(rows):
    await asyncio.sleep(0.01)
    lengths = [len(row["completion"]) for row in rows]
    return [length - sum(lengths) / len(lengths) for length in lengths]
"""


@pytest.fixture
def section(tmp_path: Path) -> Section:
    (tmp_path / "letters.py").write_text(LETTERS)
    return section_of(
        STEPS,
        {"verifier": f"{tmp_path / 'letters.py'}:share_of_small_letters"},
        generation={"max_completion_length": 6, "shard_size": 2},
        training={"learning_rate": 1e-3, "adam_epsilon": 1e-5},
    )


def curve_of(store: Path, reference: Reference, name: str) -> list[tuple[float, float]]:
    saved = attachment(open_store(store), reference, CURVE)
    assert saved is not None
    return [(line["step"], line["metrics"][name]) for line in Curve.from_bytes(saved).lines]


def test_after_the_death_of_an_actor_the_run_ends_in_the_same_policy_with_the_same_samples(
    section: Section, machines: Any, resources: ResourcesConfig, run: RunRl, actors: Any, tmp_path: Path
) -> None:
    section["rewards"][0]["normalise"] = "running"  # all state of a run beside weights and optimisers
    section |= {
        "filter": {"low": 0.053, "high": 0.207, "max_refills": 2},
        "kl": {"coefficient": 0.1, "target": 0.01, "horizon": 100},
        "ema": {"decay": 0.5},
        "pretraining": {"data": "none.jsonl", "batch_size": 3},
        "best": {"prompts": "none.jsonl", "eval_steps": 1},
        "training": {**section["training"], "save_steps": 1, "save_total_limit": 2},
    }
    seen: dict[float, float] = {}

    def watch(done: float, _total: Any, _unit: str, metrics: Mapping[str, float]) -> None:
        seen[done] = metrics.get("held_out_reward", -1.0)

    whole, first = run(section, "whole", reporter=watch)
    assert "restarts" not in first.cost
    apart = resources.model_copy(update={"placement": "disaggregated"})  # engines do not sleep then
    for dies, stays in (("trainers", "engines"), ("engines", "trainers")):
        killer, before = Killer(machines(2), dies, at=2), actors()
        _, killed = run(section, dies, resources=apart, reporter=killer)
        assert killed.cost["restarts"] == 1
        assert killer.done == [0, 1, 2, 2, 3, 4], "it resumed from the checkpoint after step 2"
        assert killed.outputs == first.outputs
        curves = [curve_of(tmp_path / name / "store", killed.reference, "reward") for name in ("whole", dies)]
        assert [step for step, _ in curves[0]] == [1, 2, 3, 4]
        assert curves[1] == curves[0], "the step that was taken twice is there once"
        assert actors()[stays] == before[stays], "only the group in which an actor died started again"
        assert not {*actors()[dies]} & {*before[dies]}
    policy, ema, best = ((whole[name] / "model.safetensors").read_bytes() for name in ("policy", "average", "best"))
    assert policy != ema
    assert first.metrics["best_step"] == max(seen, key=lambda step: (seen[step], -step))
    assert (best == policy) == (first.metrics["best_step"] == STEPS)
    kept = [name for name in whole if name.startswith("checkpoint-")]
    assert kept == ["checkpoint-2", "checkpoint-3"]
    models = {f"checkpoint-{first.metrics['best_step']}": best, f"checkpoint-{STEPS}": policy}
    for name in kept:
        content = (whole[name] / "model.safetensors").read_bytes()
        assert content == models.setdefault(name, content)
        transformers.AutoModelForCausalLM.from_pretrained(whole[name])
    assert len({*models.values()}) == len(models)

    rows = rows_of(whole)
    drawn = {row["group"]: row["prompt"] for row in rows}
    assert sorted(row["group"] for row in rows) == sorted([*range(len(drawn))] * 4), "none is lost, none taken twice"
    assert len(drawn) > 3 * STEPS, "some taught nothing, and others were taken for them"
    assert sorted(drawn[group] for group in range(8)) == list(range(8)), "an epoch takes each prompt once"
    assert {row["used"] for row in rows} == {True, False}
    rewards = {g: np.array([row["rewards"][0] for row in rows if row["group"] == g]) for g in drawn}
    teaches = {g for g, values in rewards.items() if np.ptp(values) > 0 and 0.053 < values.mean() < 0.207}
    assert all((row["group"] in teaches) == row["used"] for row in rows)


ALGORITHMS: dict[str, dict[str, Any]] = {
    "PPO": {
        "advantage": {"estimator": "gae", "whiten": "mean-and-deviation"},
        "critic": {"learning_rate": 1e-3},
        "kl": {"coefficient": 0.05, "place": "reward", "estimator": "k1"},
        "training.num_train_epochs": 2,
    },
    "PPO whose critic begins alone": {
        "advantage": {"estimator": "gae"},
        "critic": {"learning_rate": 1e-3, "freezing_steps": 1, "value_clip": None, "normalise": True},
        "kl": {"coefficient": 0.1, "target": 0.01, "place": "reward"},
    },
    "REINFORCE++": {"advantage": {"estimator": "returns", "whiten": "mean-and-deviation"}},
    "REINFORCE++-baseline": {
        "advantage": {"estimator": "group", "whiten": "mean-and-deviation"},
        "kl": {"coefficient": 0.01, "estimator": "k2"},
    },
    "RLOO": {"advantage": {"estimator": "leave-one-out"}},
    "GRPO": {
        "advantage": {"estimator": "group", "scale_rewards": "group"},
        "loss": {"aggregation": "sequence-mean-token-mean"},
        "kl": {"coefficient": 0.04},
    },
    "Dr. GRPO": {"advantage": {"estimator": "group"}, "loss": {"aggregation": "fixed-length"}},
    "DAPO": {"advantage": {"estimator": "group", "scale_rewards": "group"}, "loss": {"epsilon_high": 0.28}},
    "FlashREINFORCE": {"advantage": {"estimator": "batch"}, "generation.num_generations": 1},
    "GSPO": {"loss": {"loss_type": "gspo", "epsilon": 3e-4, "epsilon_high": 4e-4}, "training.batch_size": 6},
    "CISPO": {"loss": {"loss_type": "cispo", "epsilon": 1.0}, "training.batch_size": 6},
    "SAPO": {"loss": {"loss_type": "sapo"}, "training.batch_size": 6},
    "entropy bonus and PPO-ptx": {
        "loss": {"entropy_coef": 0.01},
        "training.num_train_epochs": 2,
        "pretraining": {"data": "none.jsonl", "batch_size": 3},
    },
    "temperature": {"generation.temperature": 0.5, "kl": {"coefficient": 0.1}, "training.num_train_epochs": 2},
    "LoRA": {"training.lora": {"r": 4}, "kl": {"coefficient": 0.04}},
    "QLoRA": {"training.lora": {"r": 4, "load_in_4bit": True}, "kl": {"coefficient": 0.04}},
    "8 bits": {"training.lora": {"r": 4, "load_in_8bit": True}, "kl": {"coefficient": 0.04}},
    "TIS": {"importance_sampling_correction": {"mode": "clip"}},
    "high-entropy tokens": {"loss": {"top_entropy_quantile": 0.2}},
    "IcePop": {"importance_sampling_correction": {"mode": "mask", "low": 0.5, "high": 5.0}},
    "trust region": {
        "importance_sampling_correction": {"mode": "mask", "level": "sequence", "measure": "kl", "high": 0.01}
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains(name: str, section: Section, tiny_model: Any, run: RunRl) -> None:
    for path, value in ALGORITHMS[name].items():
        part, _, field = path.partition(".")
        section[part] = {**section[part], field: value} if field else value
    outputs, result = run({**section, "steps": 2})
    metrics = result.metrics
    assert metrics["mismatch"] < 1e-6, "the engine samples from the policy that is trained, at its temperature"
    assert np.isfinite([value for value in metrics.values() if isinstance(value, float)]).all()
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model(), outputs["policy"]))
    assert any(bool((before[tensor] != after[tensor]).any()) for tensor in after)

    if "alone" in name:
        assert metrics["kl_coefficient"] == 0.1, "it does not move while the policy does not"
    table = pq.read_table(outputs["trajectories"] / "step-000001.parquet")
    referred = ALGORITHMS[name].get("kl", {}).get("coefficient", 0.0) > 0
    assert (table.column("reference_logps").null_count == 0) == referred == ("kl" in metrics)
    assert (table.column("old_values").null_count == 0) == ("critic" in ALGORITHMS[name]) == ("critic_loss" in metrics)
    advantages = np.concatenate(table.column("advantages").to_pylist())
    if "baseline" in name or name == "PPO":
        assert (abs(advantages.mean()), advantages.std()) == pytest.approx((0, 1), abs=1e-4)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_adapters_of_policy_and_critic_train_and_the_engine_follows(
    zero_stage: int, section: Section, resources: ResourcesConfig, tiny_model: Any, run: RunRl
) -> None:
    section |= {
        "steps": 2,
        "advantage": {"estimator": "gae"},
        "critic": {"learning_rate": 1e-3},
        "kl": {"coefficient": 0.05, "place": "reward", "estimator": "k1"},
        "ema": {"decay": 0.5},
        "best": {"prompts": "none.jsonl", "eval_steps": 1},
        "training": {**section["training"], "learning_rate": 1e-2, "lora": {"r": 4}},
    }
    resources = resources.model_copy(update={"zero_stage": zero_stage})
    outputs, result = run(section, resources=resources)
    assert result.metrics["mismatch"] < 1e-6, "the engine samples from the policy that is trained"
    before = load_file(tiny_model() / "model.safetensors")
    for name in ("policy", "average", "best", "critic"):
        after = load_file(outputs[name] / "model.safetensors")
        moved = {parameter for parameter, weight in before.items() if not torch.equal(weight, after[parameter])}
        assert moved == {parameter for parameter in before if "proj" in parameter}, name
        assert after.keys() - before.keys() == ({"score.weight"} if name == "critic" else set())
    beside = peft.PeftModel.from_pretrained(
        load_model(str(tiny_model()), "lm", torch.float32), outputs["adapter"]
    ).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = load_model(str(outputs["policy"]), "lm", torch.float32).eval()(ids).logits
        torch.testing.assert_close(beside(ids).logits, expected, atol=1e-4, rtol=1e-4)
    rows = pq.read_table(outputs["trajectories"] / "step-000001.parquet").to_pylist()
    assert all(np.abs(np.subtract(row["reference_logps"], row["old_logps"])).max() > 1e-4 for row in rows)


def test_two_reward_models_at_once_one_of_another_tokenizer_and_a_verifier_that_fails_now_and_then(
    section: Section, tiny_model: Any, tmp_path: Path, run: RunRl
) -> None:
    judge, reads_text = tmp_path / "judge", reward_model_with_another_tokenizer(tmp_path / "text", tiny_model())
    shutil.copytree(tiny_model(), judge)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1)
    model.save_pretrained(judge)
    (tmp_path / "fails.py").write_text(FAILS)
    section |= {
        "steps": 2,
        "rewards": [
            {"reward_model": "ours", "weight": 2.0},
            {"verifier": f"{tmp_path / 'fails.py'}:now_and_then", "max_failed": 0.5},
            {"reward_model": "another/judge", "weight": -0.5},
        ],
        "shaping": {"truncation_penalty": 0.25},
    }
    given = [json.dumps(user(f"{number}+{number}=")) for number in range(8)]
    data = prompts().append_column("messages", pa.array(given))
    outputs, result = run(section, judges={"reward-0": judge, "reward-2": reads_text}, rows=data)
    (warning,) = result.warnings
    assert "rl.rewards.2.reward_model: " in warning
    assert "has another tokenizer than" in warning
    rows = rows_of(outputs)
    assert (result.cost["failed_rewards"], len(rows)) == (6, 24), "every fourth of twelve, in two steps"
    missing = [row for row in rows if row["failures"]]
    assert [row["failures"] for row in missing] == [[None, "raised", None]] * 6
    assert all((row["used"], row["reward"], row["rewards"][1]) == (False, None, None) for row in missing)
    rows = [row for row in rows if not row["failures"]]
    assert all(row["used"] and row["advantages"] for row in rows)
    tokenizer = byte_tokenizer()
    for row in rows[:6]:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            score = float(model(ids).logits[0, 0])
        text = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        truncated = row["finish_reason"] == "length"
        conversation = rendered(reads_text, json.loads(row["messages"]), text)
        of_text = score_of(reads_text, conversation.removesuffix("<end>\n") if truncated else conversation)
        expected = 2 * score + len(text) / 100 - 0.5 * of_text - 0.25 * truncated
        assert row["rewards"] == pytest.approx([score, len(text) / 100, of_text], abs=1e-5)
        assert row["reward"] == pytest.approx(expected, abs=1e-4)


def test_an_async_function_of_the_group_and_an_endpoint_one_of_whose_replicas_dies(
    section: Section, tmp_path: Path, run: RunRl
) -> None:
    (tmp_path / "group.py").write_text(GROUP)
    lasting = Server(lengths)

    def last_answer(content: dict[str, Any]) -> tuple[int, bytes]:
        threading.Thread(target=dying.end).start()
        return lengths(content)

    dying = Server(last_answer)
    rewards = [
        {"function": f"{tmp_path / 'group.py'}:against_the_mean"},
        {"urls": [dying.url, lasting.url], "batch_size": 4},
    ]
    outputs, result = run(section | {"steps": 2, "rewards": rewards})
    lasting.end()
    rows = rows_of(outputs)
    assert (result.cost["failed_rewards"], len(rows), len(dying.requests) + len(lasting.requests)) == (0, 24, 6)
    assert 1 <= len(dying.requests) < 6
    tokenizer = byte_tokenizer()
    texts = [tokenizer.decode(row["completion_ids"], skip_special_tokens=True) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        mine = [
            len(completion) for completion, other in zip(texts, rows, strict=True) if other["group"] == row["group"]
        ]
        assert row["rewards"] == pytest.approx([len(text) - np.mean(mine), len(text)])


def test_a_step_of_only_uninformative_prompts_is_an_error(section: Section, run: RunRl) -> None:
    section["filter"] = {"low": 0.99, "high": 1.0, "max_refills": 1}
    with pytest.raises(
        DataError, match=r"step 0: rl.filter drops all 6 prompts, as the completions of each have equal"
    ):
        run(section)


LEARNED = """
from pathlib import Path

def learned(prompt, completion, label):
    with Path(__file__).with_suffix(".calls").open("ab") as calls:
        calls.write(b"x")
        calls.flush()
        number = calls.tell()
    return number % 2 if number <= 12 else 1
"""
"""A reward of a task that the policy has learned after the first step: then all completions are right."""


def test_steps_of_a_task_that_the_policy_has_learned_change_nothing_and_do_not_end_the_run(
    section: Section, run: RunRl, tmp_path: Path
) -> None:
    """As with TRL, whose loss is zero then. A run that died could not be finished: it samples the same again."""
    section |= {
        "filter": {"max_refills": 0},
        "kl": {"coefficient": 0.01, "sync_ref_model": {"sync_steps": 2, "mixup_alpha": 0.5}},
    }
    section["training"] |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    weights = []
    for steps in (1, 3):
        (tmp_path / f"learned_{steps}.py").write_text(LEARNED)
        section["rewards"] = [{"verifier": f"{tmp_path / f'learned_{steps}.py'}:learned"}]
        outputs, result = run(section | {"steps": steps}, f"run-{steps}")
        weights.append(load_file(outputs["policy"] / "model.safetensors"))
    first, *skipped = steps_of(outputs)
    assert [any(row["used"] for row in rows) for rows in (first, *skipped)] == [True, False, False]
    assert [row["advantages"] for rows in skipped for row in rows] == [None] * 24
    (warning,) = result.warnings
    assert warning.startswith(
        "2 of 3 steps changed nothing, because rl.filter or rl.loss.mask_truncated_completions left"
    )
    assert all(torch.equal(weights[0][name], weight) for name, weight in weights[1].items())
    assert result.metrics["prompts_used"] == 0


def test_an_engine_that_does_not_hold_the_policy_ends_the_run_and_its_step_is_kept(
    section: Section, monkeypatch: pytest.MonkeyPatch, run: RunRl, tmp_path: Path
) -> None:
    def old_weights_under_the_new_name(weights: WeightSync, step: int) -> None:
        context = weights.context
        weights.engines.all(Engine.load, context.inputs["policy"], version_of(str(context.references["policy"]), step))

    monkeypatch.setattr(WeightSync, "_send_weights", old_weights_under_the_new_name)
    section |= {"importance_sampling_correction": {"stop_above": 1e-3}, "trajectories": {"keep": "last", "steps": 1}}
    section["training"]["learning_rate"] = 1e-2
    with pytest.raises(
        NumericError, match=r"step 1: the policy that sampled and the one that is trained differ by 0\.\d+"
    ):
        run(section)
    assert [file.name for file in tmp_path.rglob("step-*.parquet")] == ["step-000001.parquet"]


@pytest.mark.parametrize(("keep", "kept"), [("last", [3, 4]), ("every", [0, 2, 4])])
def test_configured_trajectories_are_kept_and_an_uninformative_run_warns(
    keep: str, kept: list[int], section: Section, tmp_path: Path, run: RunRl
) -> None:
    section |= {"steps": 5, "trajectories": {"keep": keep, "steps": 2}}
    equal = keep == "every"
    if equal:
        (tmp_path / "equal.py").write_text("def equal(prompt, completion, label):\n    return 0.5\n")
        section["rewards"] = [{"verifier": f"{tmp_path / 'equal.py'}:equal"}]
    outputs, result = run(section)
    assert sorted(file.name for file in outputs["trajectories"].iterdir()) == [f"step-{n:06d}.parquet" for n in kept]
    metrics = result.metrics
    assert 0 <= metrics["reward.first"] <= 1 <= metrics["completion_length.first"]
    if equal:
        assert (metrics["reward.first"], metrics["reward"]) == (0.5, 0.5)
        unmoved, equal_rewards = result.warnings
        assert unmoved.startswith("the policy is identical to the initial one")
        assert equal_rewards.startswith("in every step all completions had equal rewards")
    else:
        assert result.warnings == []


FALLS = """
calls = 0

def falls(prompt, completion, label):
    global calls
    calls += 1
    return 1 / calls
"""
"""A reward that falls from call to call, so that the best policy is the first that was evaluated."""


def test_the_share_of_changed_weights_is_measured_of_each_policy_that_may_be_the_result(
    section: Section, run: RunRl, tmp_path: Path, tiny_model: Any
) -> None:
    (tmp_path / "falls.py").write_text(FALLS)
    section |= {
        "steps": 2,
        "rewards": [{"verifier": f"{tmp_path / 'falls.py'}:falls"}],
        "ema": {"decay": 0.9},
        "best": {"prompts": "none.jsonl", "eval_steps": 1},
        "result": "best",
    }
    section["training"] |= {"bf16": True, "learning_rate": 1e-5, "lr_scheduler_type": "constant"}
    outputs, result = run(section)
    assert result.metrics["best_step"] == 1
    start = load_file(tiny_model() / "model.safetensors")

    def changed(output: str) -> float:
        """As they are saved, in bf16."""
        after = load_file(outputs[output] / "model.safetensors")
        differ = [after[name] != weight.bfloat16() for name, weight in start.items()]
        return float(sum(map(torch.sum, differ))) / sum(map(torch.numel, differ))

    shares = [changed(output) for output in ("policy", "average", "best")]
    measured = [result.metrics[f"changed_weights{part}"] for part in ("", "/average", "/best")]
    assert measured == pytest.approx(shares, rel=1e-5)
    assert len({*shares}) == 3


@pytest.mark.parametrize("lora", [None, {"r": 2, "lora_alpha": 2}], ids=["all weights", "lora"])
def test_a_policy_in_bf16_has_master_weights_from_which_the_next_run_continues(
    lora: Any, section: Section, run: RunRl, tmp_path: Path
) -> None:
    section |= {"steps": 1, "ema": {"decay": 1e-9}}  # in fp32 the average is the weights
    section["training"] |= {"bf16": True, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "lora": lora}
    first, _ = run(section)
    open_store(tmp_path / "next" / "store").publish(first[MASTERS], MASTERS)
    following, _ = run(section, "next", first["policy"])
    exact = []
    for outputs in (first, following):
        (file,) = outputs[MASTERS].iterdir()
        masters = {name.removeprefix("weights.model."): tensor for name, tensor in load_file(file).items()}
        policy = load_file(outputs["policy"] / "model.safetensors")
        assert all(torch.equal(masters[name].bfloat16(), policy[name]) for name in policy)
        average = load_file(outputs["average"] / "model.safetensors")
        assert all(torch.equal(average[name], policy[name]) for name in policy)
        exact.append(masters)
    moved = max(float((exact[1][name] - exact[0][name]).abs().max()) for name in exact[0])
    assert 0 < moved < 1.01e-5, "one step from the master weights, where rounding would be up to 2⁻⁹ of a weight"
    with pytest.raises(UserError, match="keep_master_weights: false"):
        run(section, "elsewhere", first["policy"])


def test_a_loss_that_explodes_names_learner_step_and_rows(section: Section, run: RunRl) -> None:
    section["training"]["max_loss"] = 1e-9
    section |= {"advantage": {"estimator": "gae"}, "critic": {"freezing_steps": 1}}
    says = r"critic: the loss is .+ above training\.max_loss 1e-09, at step 0 of 4; the rows of its batch are (\d+(, )?){12} of"
    with pytest.raises(NumericError, match=says):
        run(section)
