"""The trainer of a policy on real DeepSpeed ranks: its state beside the weights, and additional losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.models.model_ref import Model
from alignment_core.recipes.sections.rl import RlConfig
from alignment_core.training.methods.sft import Sft
from alignment_core.training.policy_trainer import PolicyTrainer, RlJob
from alignment_core.training.rank_folders import write
from alignment_core.training.ranks import TrainerActors
from alignment_core.training.ranks import open_job as open_policy
from alignment_core.training.resumable import resume, save_progress
from alignment_core.training.step_data import StepData
from alignment_core.training.step_report import StepReport
from tests.matrix import cases
from tests.training.conftest import MODEL, random_ids
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, train

pytestmark = pytest.mark.slow

ROWS = 8


def sampled(advantage: float = 1.0) -> StepData:
    """A step's completions; every other one did well."""
    random = np.random.default_rng(2)
    prompts, completions = zip(
        *[(random_ids(random, 2, 20), random_ids(random, 3, 30)) for _ in range(ROWS)], strict=True
    )
    data = StepData.of(prompts, completions, [[True] * len(completion) for completion in completions])
    signs = np.repeat(np.where(np.arange(ROWS) % 2, 1.0, -1.0), data.lengths_S)
    data.numbers["rollout_logps"] = np.full(len(signs), -5.0, np.float32)
    data.numbers["advantages"] = (advantage * signs).astype(np.float32)
    return data


def distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([(first[name].double() - second[name].double()).flatten() for name in second]).norm())


class Policy:
    """The trainer of a policy on so many ranks."""

    def __init__(
        self,
        trainers: TrainerActors,
        machines: Any,
        model: Path,
        folder: Path,
        section: dict[str, Any],
        pretraining: Path | None = None,
        reference: Path | None = None,
        critic: Path | None = None,
        **resources: Any,
    ) -> None:
        training = {
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-5,
            "lr_scheduler_type": "constant",
            "batch_size": ROWS,
            **section.pop("training", {}),
        }
        whole = {"prompts": "none.jsonl", "rewards": [{"verifier": "task"}], "training": training, **section}
        self.trainers, self.folder = trainers, folder
        self.job = RlJob(
            RlConfig.model_validate(whole),
            Model(model, MODEL),
            Model(critic, MODEL) if critic else None,
            seed=3,
            pretraining=pretraining,
            reference=Model(reference, MODEL) if reference else None,
        )
        self.resources = machines.resources.model_copy(update=resources)
        folder.mkdir()

    def open(self) -> int:
        """Steps that its progress holds."""
        self.ranks = open_policy(self.trainers, self.job, self.resources)
        return resume([self.ranks], self.folder)["step"]

    def learn(self, data: StepData, kl_coefficient: float = 0.0) -> list[dict[str, StepReport]]:
        """One step on these completions."""
        self.ranks.all(PolicyTrainer.load, data)
        return self.ranks.all(PolicyTrainer.update, {}, kl_coefficient)

    def logps(self, data: StepData) -> dict[str, np.ndarray]:
        """Of the policy as it is, and of its reference. [K] each"""
        self.ranks.all(PolicyTrainer.load, data)
        return self.ranks.all(PolicyTrainer.forward, True, ["old_logps", "reference_logps"])[0]

    def save(self) -> None:
        """A checkpoint of this step."""
        save_progress([self.ranks], self.folder, driver={})

    def export(self, name: str) -> dict[str, torch.Tensor]:
        write(self.ranks, [self.folder / name], PolicyTrainer.export, name, self.folder / name)
        return load_file(self.folder / name / "model.safetensors")


@pytest.mark.parametrize(
    ("zero_stage", "bf16"),
    cases(
        [(0, False), (1, False), (2, False), (3, False), (0, True), (1, True), (3, True)],
        usual=[(0, False), (1, True), (3, True)],
    ),
)
def test_the_moving_average_follows_the_equation_and_survives_a_stop(
    zero_stage: int, bf16: bool, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    section = {"ema": {"decay": 0.75}, "training": {"bf16": bf16}}
    with machines(2).trainers() as group:
        policy = Policy(group, machines(2), tiny_model(), tmp_path / "run", section, zero_stage=zero_stage)
        policy.open()
        expected = policy.export("policy")  # the average begins as the weights that it starts from
        kind = next(iter(expected.values())).dtype
        assert kind == (torch.bfloat16 if bf16 else torch.float32)
        expected = {name: tensor.double() for name, tensor in expected.items()}
        for number in range(3):
            policy.learn(sampled())
            if number == 1:
                policy.save()
            weights = policy.export("policy")
            expected = {name: 0.75 * expected[name] + 0.25 * weights[name].double() for name in expected}
        average = policy.export("average")
        again = policy.export("policy")
        assert all(torch.equal(again[name], weights[name]) for name in weights), "it leaves the weights alone"
        assert average.keys() == expected.keys()
        assert {tensor.dtype for tensor in average.values()} == {kind}
        wrong = distance(average, expected) / distance(weights, expected)
        assert wrong < (0.3 if bf16 else 1e-3), "in bf16 the trainer averages before it rounds, this test after it"

        assert policy.open() == 2
        policy.learn(sampled())
        resumed = policy.export("average")
        assert all(torch.equal(resumed[name], average[name]) for name in average)


@pytest.mark.parametrize(
    ("zero_stage", "bf16"), cases([(0, False), (2, True), (3, False)], usual=[(2, True), (3, False)])
)
def test_a_refreshed_reference_is_the_policy_of_that_step_and_survives_a_stop(
    zero_stage: int, bf16: bool, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    section = {
        "kl": {"coefficient": 0.1, "sync_ref_model": {"mixup_alpha": 1.0, "sync_steps": 2}},
        "training": {"bf16": bf16},
    }
    with machines(2).trainers() as group:
        policy = Policy(group, machines(2), tiny_model(), tmp_path / "run", section, zero_stage=zero_stage)
        policy.open()
        differences, references = [], []
        for number in range(4):
            logps = policy.logps(sampled())
            differences.append(float(np.abs(logps["old_logps"] - logps["reference_logps"]).max()))
            references.append(logps["reference_logps"])
            policy.ranks.all(PolicyTrainer.update, {}, 0.1)
            if number == 2:
                policy.save()
        close = 0.05 if bf16 else 1e-5
        assert [difference < close for difference in differences] == [True, False, True, False], differences
        assert np.abs(references[3] - references[0]).max() > 1e-3

        assert policy.open() == 3
        resumed = policy.logps(sampled())
        np.testing.assert_array_equal(resumed["reference_logps"], references[3])


def test_another_model_may_be_the_reference(machines: Any, tiny_model: Any, tmp_path: Path) -> None:
    other = tiny_model(seed=2)
    logps = []
    for name, model, reference, training in (
        ("other", tiny_model(), other, {}),
        ("lora", tiny_model(), other, {"lora": {"r": 2}}),
        ("itself", other, None, {}),
    ):
        section = {"kl": {"coefficient": 0.1}, "training": training}
        with machines(1).trainers() as group:
            policy = Policy(group, machines(1), model, tmp_path / name, section, reference=reference)
            policy.open()
            logps.append(policy.logps(sampled())["reference_logps"])
    np.testing.assert_allclose(logps[0], logps[2], atol=1e-5)
    np.testing.assert_allclose(logps[1], logps[2], atol=1e-5)


def test_the_mixed_in_loss_is_the_fine_tuning_loss_for_every_split(
    make_job: Any, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    job = make_job(Sft(), batch_size=14, num_train_epochs=1, lr_scheduler_type="constant")
    with machines(1).trainers() as group:
        sft = open_job(group, machines(1), job, tmp_path / "progress")
        [expected] = train(sft, 1)
        weights = load_file(export(sft, tmp_path / "sft"))

    for coefficient in (1.0, 0.25):
        pretraining = {"data": "none.jsonl", "coefficient": coefficient, "batch_size": 14}
        section = {"pretraining": pretraining, "training": {"warmup_ratio": 0}}
        with machines(2).trainers() as group:
            policy = Policy(
                group,
                machines(2),
                tiny_model(),
                tmp_path / f"run-{coefficient}",
                section,
                job.train_data,
                max_tokens_per_microbatch=64,
            )
            policy.open()
            ranks = policy.learn(sampled(advantage=0.0))  # the policy's own loss has no gradient then
            mixed = policy.export("policy")
        reports = [rank["pretraining"] for rank in ranks]
        assert sum(report.normaliser for report in reports) == expected.normaliser
        loss = sum(report.sums["loss"] for report in reports)
        assert loss == pytest.approx(expected.sums["loss"], rel=1e-5), (
            "it is reported as it is, without the coefficient"
        )
        assert ranks[0]["policy"].grad_norm == pytest.approx(coefficient * expected.grad_norm, rel=1e-4)
        if coefficient == 1.0:
            assert greatest_difference(weights, mixed) < 1e-5


def test_the_critic_has_its_own_warm_up_and_clipping(machines: Any, tiny_model: Any, tmp_path: Path) -> None:
    """Warm-up of the critic over 4 steps to 2e-3, none of the policy: 1/5 and 2/5 of 2e-3 beside 1e-3. With β of 0 and an ε of
    1 a step of Adam is rate · gradient / (|gradient| + 1), so a critic whose gradient is clipped at 1e-6 moves by 1e-6 of its
    rate at most."""
    section = {
        "steps": 20,
        "critic": {
            "learning_rate": 2e-3,
            "warmup_steps": 4,
            "max_grad_norm": 1e-6,
            "adam_beta1": 0,
            "adam_beta2": 0,
            "adam_epsilon": 1,
        },
        "advantage": {"estimator": "gae"},
        "training": {"lr_scheduler_type": "constant", "warmup_ratio": 0},
    }
    data = sampled()
    data.numbers.update(dict.fromkeys(("returns", "old_values"), data.numbers["advantages"]))
    with machines(1).trainers() as group:
        policy = Policy(group, machines(1), tiny_model(), tmp_path / "run", section, critic=tiny_model())
        policy.open()
        before = {name: policy.export(name) for name in ("policy", "critic")}
        reports = [policy.learn(data)[0] for _ in range(2)]
        after = {name: policy.export(name) for name in ("policy", "critic")}
    rates = [{name: report.learning_rate for name, report in step.items()} for step in reports]
    assert rates == [
        {"critic": pytest.approx(0.4e-3), "policy": 1e-3},
        {"critic": pytest.approx(0.8e-3), "policy": 1e-3},
    ]
    assert reports[0]["critic"].grad_norm > 1e-3, "the gradient is clipped"
    moved = {name: greatest_difference(before[name], after[name]) for name in before}
    assert 0 < moved["critic"] <= 1.2e-3 * 1e-6 + 1e-8
    assert moved["policy"] > 1e-4


def test_a_policy_that_waits_for_its_critic_warms_up_from_its_own_first_step(
    machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """20 steps, 4 of warm-up, the critic ahead by 5: by hand the critic is at its peak of 2e-3 then, as its warm-up (1/5 to
    4/5) is over, and the policy begins with 1/5 and 2/5 of its own peak of 1e-3."""
    section = {
        "steps": 20,
        "critic": {"learning_rate": 2e-3, "freezing_steps": 5},
        "advantage": {"estimator": "gae"},
        "training": {"warmup_ratio": 0.2},
    }
    data = sampled()
    data.numbers.update(dict.fromkeys(("returns", "old_values"), data.numbers["advantages"]))
    with machines(1).trainers() as group:
        policy = Policy(group, machines(1), tiny_model(), tmp_path / "run", section, critic=tiny_model())
        policy.open()
        reports = [policy.learn(data)[0] for _ in range(7)]
    rates = [{name: report.learning_rate for name, report in step.items()} for step in reports]
    assert rates[0] == {"critic": pytest.approx(0.4e-3)}
    assert rates[4:] == [
        {"critic": 2e-3},
        {"critic": 2e-3, "policy": pytest.approx(0.2e-3)},
        {"critic": 2e-3, "policy": pytest.approx(0.4e-3)},
    ]


@pytest.mark.parametrize("of_values", [(0.0, 1.0), (-1.5, 0.1)])
def test_a_critic_learns_and_values_in_units_of_the_reward(
    of_values: tuple[float, float], machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """Outputs less 3, over 2: before the first update the values are those of plain outputs in these units, and returns that
    equal them leave no error, also where both are standardised."""
    section = {"critic": {"learning_rate": 1e-3}, "advantage": {"estimator": "gae"}}
    data = sampled()
    with machines(1).trainers() as group:
        policy = Policy(group, machines(1), tiny_model(), tmp_path / "run", section, critic=tiny_model())
        policy.open()
        values = []
        for units in ((0.0, 1.0), (3.0, 2.0)):
            policy.ranks.all(PolicyTrainer.load, data, units)
            values.append(policy.ranks.all(PolicyTrainer.forward, False, ["old_values"])[0]["old_values"])
        mean, deviation = of_values
        returns = (values[1] - mean) / deviation
        (reports,) = policy.ranks.all(PolicyTrainer.update, {"returns": returns}, 0.0, of_values)
    np.testing.assert_allclose(values[1], (values[0] - 3) / 2, rtol=1e-5)
    assert reports["critic"].sums["error"] / len(values[1]) < 1e-5 / deviation
    assert reports["critic"].sums["loss"] / len(values[1]) < 1e-8, "the clipped values are in the same units"


def test_tokens_of_high_entropy_are_those_of_all_ranks(machines: Any, tiny_model: Any, tmp_path: Path) -> None:
    """By plain `transformers`; without the others' advantages a training on all tokens is the same."""
    data = sampled()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32).eval()
    entropies = []
    for row in data.rows():
        (sequence,) = row.sequences
        with torch.no_grad():
            logps = model(torch.from_numpy(sequence.ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        entropies.append(-(logps.exp() * logps).sum(-1)[np.flatnonzero(sequence.targets) - 1])
    entropy_K = torch.cat(entropies).numpy()
    others_K = entropy_K < np.sort(entropy_K)[4 * len(entropy_K) // 5]  # the first above four fifths of the way
    alone = sampled()
    alone.numbers["advantages"][others_K] = 0
    weights = []
    for world, quantile, batch in ((1, 1.0, alone), (1, 0.2, data), (2, 0.2, data)):
        section = {"loss": {"top_entropy_quantile": quantile}}
        folder = tmp_path / f"{world}-{quantile}"
        with machines(world).trainers() as group:
            cut: Any = {"max_tokens_per_microbatch": 64, "zero_stage": 2 if world == 2 else 0}
            policy = Policy(group, machines(world), tiny_model(), folder, section, **cut)
            policy.open()
            policy.ranks.all(PolicyTrainer.load, batch)
            policy.ranks.all(PolicyTrainer.forward, True, [])
            policy.ranks.all(PolicyTrainer.update, {}, 0.0)
            weights.append(policy.export("policy"))
    assert all(greatest_difference(weights[0], other) < 1e-5 for other in weights[1:])
