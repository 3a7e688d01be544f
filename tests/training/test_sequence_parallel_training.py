"""Trainer ranks that compute each micro-batch together: every method ends with the losses and weights of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.cluster.actor import call
from alignment_core.errors import InfrastructureError
from alignment_core.models import vocabulary_head
from alignment_core.models.model_ref import Model
from alignment_core.models.scratch import create_model
from alignment_core.recipes import DpoLossConfig, ScratchModel
from alignment_core.recipes.sections.distillation import DistillationLossConfig
from alignment_core.recipes.sections.preference import ReferenceSyncConfig
from alignment_core.training.forward import Forward, ForwardJob
from alignment_core.training.methods.distillation import Distillation
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.dpo_beta import DynamicDpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.policy_trainer import PolicyTrainer, averages
from alignment_core.training.ranks import TrainerActors, run_blocks
from alignment_core.training.ranks import open_job as open_on
from alignment_core.training.resumable import save_progress
from alignment_core.training.step_report import StepReport
from alignment_core.training.teacher import Teacher, TeacherJob
from alignment_core.training.trainer import Trainer, TrainJob
from tests.matrix import matrix
from tests.training.adapted_head import HeadAdapted
from tests.training.conftest import MODEL
from tests.training.test_distillation_training import models, said_of  # noqa: F401 (a fixture)
from tests.training.test_kto_training import KTO, logps_of
from tests.training.test_kto_training import table as labelled  # noqa: F401 (a fixture)
from tests.training.test_policy_ranks import Policy, sampled
from tests.training.test_process_reward_training import METHOD as STEPS
from tests.training.test_process_reward_training import table as stepwise  # noqa: F401 (a fixture)
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train

pytestmark = pytest.mark.slow

PLACES = 7
"""Places whose logits each of several ranks computes at a time; one rank computes all of them at once."""
Weights = dict[str, torch.Tensor]
Step = tuple[Any, Any, dict[str, Weights]]
"""Of a policy: numbers of the forward passes before it, metrics, and the weights of each model after it."""


@dataclass
class Result:
    """Of three steps."""

    weights: Weights
    trained: list[dict[str, float]]
    """Metrics of each step, the norm of its gradient, and its tokens."""
    held_out: dict[str, float]


@contextmanager
def parts_of_logits(trainers: TrainerActors) -> Iterator[TrainerActors]:
    """Has several ranks compute the logits of ``PLACES`` places at a time, and one rank those of all places."""
    ranks = range(trainers.group.size)
    places = PLACES if len(ranks) > 1 else 10_000
    trainers.group.run_on(ranks, setattr, vocabulary_head, "PLACES", places)
    assert trainers.group.run_on(ranks, getattr, vocabulary_head, "PLACES") == [places] * len(ranks)
    try:
        yield trainers
    finally:
        with suppress(InfrastructureError):  # of actors that died
            trainers.group.run_on(ranks, setattr, vocabulary_head, "PLACES", vocabulary_head.PLACES)


def metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """As the driver adds them up."""
    normaliser = sum(report.normaliser for report in reports)
    names = {name for report in reports for name in report.sums}
    values = {name: sum(report.sums.get(name, 0.0) for report in reports) / normaliser for name in sorted(names)}
    return {**values, "normaliser": normaliser}


def result(machines: Any, job: TrainJob, folder: Path, steps: int = 3, **resources: Any) -> Result:
    world: int = resources.pop("world", 2)
    with machines(world).trainers() as group, parts_of_logits(group):
        ranks = open_job(group, machines(world), job, folder.with_suffix(".progress"), **resources)
        trained = []
        for _ in range(steps):
            reports = train(ranks, 1)
            tokens = sum(report.tokens for report in reports)
            trained.append({**metrics(reports), "norm": reports[0].grad_norm, "tokens": tokens})
        held_out = metrics(ranks.all(Trainer.evaluate))
        return Result(load_file(export(ranks, folder)), trained, held_out)


def check_equal(ours: Result, expected: Result) -> None:
    assert greatest_difference(ours.weights, expected.weights) < 1e-5
    for step, of_one_rank in zip(ours.trained, expected.trained, strict=True):
        assert step == pytest.approx(of_one_rank, rel=1e-5, abs=1e-5)
    assert ours.held_out == pytest.approx(expected.held_out, rel=1e-5, abs=1e-5)


@pytest.fixture
def jobs(make_job: Any, tables: Any, labelled: pa.Table, stepwise: pa.Table, models: Any, tmp_path: Path) -> Any:  # noqa: F811
    """The job of each method."""

    def of(name: str) -> TrainJob:
        if name == "kto":
            ids = {"split": ["train"] * 14 + ["test"] * 14, "row": [*range(14)] * 2}
            logps = {"completion": KTO.rows(labelled), "mismatched": KTO.rows_before(labelled)}
            columns = {f"{column}_logp": np.tile(logps_of(rows, -5.5), 2) for column, rows in logps.items()}
            pq.write_table(pa.table({**ids, **columns}), tmp_path / "kto.parquet")
            return make_job(KTO, table=labelled, logps=tmp_path / "kto.parquet")  # type: ignore[no-any-return]
        if name == "distillation":
            config = DistillationLossConfig(divergence="jsd", nll_weight=0.5)
            return make_job(Distillation(config), said_of(models[1], tables["sft"], 5))  # type: ignore[no-any-return]
        methods: dict[str, tuple[Any, pa.Table]] = {
            "sft": (Sft(), tables["sft, alike"]),
            "dpo": (Dpo(DpoLossConfig(beta=0.3, nll_weight=0.2)), tables["preference, alike"]),
            "dpo, β of each batch": (
                DynamicDpo(DpoLossConfig(beta=0.3, final_beta=0.6, beta_alpha=0.6, beta_margin=1.0)),
                tables["preference"],
            ),
            "reward model": (RewardModel(), tables["preference, alike"]),
            "process reward model": (STEPS, stepwise),
        }
        job: TrainJob = make_job(*methods[name])
        return job

    return of


METHODS = ["sft", "dpo", "dpo, β of each batch", "kto", "reward model", "process reward model", "distillation"]


@pytest.mark.parametrize("method", matrix(METHODS, usual=["dpo, β of each batch", "process reward model"]))
def test_every_method_trains_as_on_one_rank(method: str, jobs: Any, machines: Any, tmp_path: Path) -> None:
    job = jobs(method)
    one = result(machines, job, tmp_path / "one", world=1)
    start = load_file(job.model.path / "model.safetensors")
    common = start.keys() & one.weights.keys()
    assert max(float((one.weights[name] - start[name]).abs().max()) for name in common) > 1e-3, "it did train"
    more = {"zero_stage": 3, "gradient_checkpointing": True, "max_tokens_per_microbatch": 64}
    check_equal(result(machines, job, tmp_path / "more", sequence_parallel_size=2, **more), one)


@pytest.mark.parametrize(
    ("method", "recomputed"),
    matrix(["sft", "reward model"], [False, True, "selective"], usual=[("reward model", "selective")]),
)
def test_every_zero_stage_trains_as_one_rank(
    method: str, recomputed: Any, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    job = jobs(method)
    one = result(machines, job, tmp_path / "one", world=1)
    for stage in range(4):
        folder = tmp_path / str(stage)
        more = {"zero_stage": stage, "gradient_checkpointing": recomputed, "max_tokens_per_microbatch": 64}
        check_equal(result(machines, job, folder, sequence_parallel_size=2, **more), one)


@pytest.fixture
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads that share two key heads."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shape = ScratchModel(
        architecture="llama",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    create_model(shape, None, 1, folder)
    return folder


@pytest.mark.parametrize("method", matrix(["sft", "dpo", "reward model"], usual=["dpo"]))
def test_four_ranks_in_one_group_or_two_train_as_one(
    method: str, jobs: Any, machines: Any, wide_model: Path, tmp_path: Path
) -> None:
    job = replace(jobs(method), model=Model(wide_model, MODEL))
    one = result(machines, job, tmp_path / "one", world=1)
    for size, stage in ((2, 2), (4, 0), (4, 3)):
        folder, cut = tmp_path / f"{size}-{stage}", {"zero_stage": stage, "max_tokens_per_microbatch": 64}
        check_equal(result(machines, job, folder, world=4, sequence_parallel_size=size, **cut), one)


@pytest.mark.parametrize(
    "variant",
    matrix(
        ["lora", "adapters on the head", "head trained whole", "noise on embeddings", "reference that follows"],
        usual=["lora", "adapters on the head", "head trained whole"],
    ),
)
def test_what_training_adds_is_that_of_one_rank(
    variant: str, jobs: Any, make_job: Any, machines: Any, tables: Any, tiny_model: Any, tmp_path: Path
) -> None:
    stages: tuple[int, ...] = (1, 3)
    if variant == "lora":
        job = make_job(Sft(), lora={"r": 4})
    elif variant == "adapters on the head":
        job = make_job(Sft(), lora={"r": 4, "target_modules": ["q_proj", "lm_head"]})
        job = HeadAdapted(**{**vars(job), "model": Model(tiny_model(tied=False), MODEL)})
        # At stage 3 ranks with other numbers of places gather the adapters another number of times, and wait for each other.
        # No recipe can have them.
        stages = (1,)
    elif variant == "head trained whole":
        job = make_job(Sft(), lora={"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
        job = replace(job, model=Model(tiny_model(tied=False), MODEL))
    elif variant == "noise on embeddings":
        job = replace(make_job(Sft(), tables["sft, alike"]), neftune_noise_alpha=5.0)
    else:
        job = replace(jobs("dpo"), sync=ReferenceSyncConfig(mixup_alpha=0.5, sync_steps=1), reference_logps=None)
    one = result(machines, job, tmp_path / "one", world=1)
    for stage in stages:
        layout = {"sequence_parallel_size": 2, "zero_stage": stage, "max_tokens_per_microbatch": 64}
        check_equal(result(machines, job, tmp_path / str(stage), **layout), one)


@pytest.mark.parametrize("zero_stage", matrix([0, 2, 3], usual=[3]))
def test_losses_in_bf16_are_those_of_one_rank_up_to_its_rounding(
    zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    """bf16 has 8 digits of precision: 2⁻⁸ = 0.4 % of a number."""
    job = make_job(Sft(), bf16=True)
    one = result(machines, job, tmp_path / "one", world=1)
    two = result(machines, job, tmp_path / "two", sequence_parallel_size=2, zero_stage=zero_stage)
    for ours, expected in zip(two.trained, one.trained, strict=True):
        assert ours == pytest.approx(expected, rel=4e-3)


def test_routers_are_balanced_as_on_one_rank(
    make_job: Any, tables: Any, mixture_model: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(Sft(), tables["sft"], router_aux_loss_coef=0.1)
    job = replace(job, model=Model(mixture_model("qwen3_moe"), MODEL))
    one = result(machines, job, tmp_path / "one", world=1)
    assert one.trained[0]["aux_loss"] > 0
    check_equal(result(machines, job, tmp_path / "two", sequence_parallel_size=2), one)


PPO = {"critic": {"learning_rate": 1e-3}, "advantage": {"estimator": "gae"}}
GRPO = {"loss": {"entropy_coef": 0.01, "top_entropy_quantile": 0.8}}


def check_same_step(expected: Step, ours: Step) -> None:
    """Two steps of a policy are equal up to rounding."""
    (numbers, reports, weights), (our_numbers, our_reports, our_weights) = expected, ours
    assert numbers.keys() == our_numbers.keys()
    for name, column in numbers.items():
        np.testing.assert_allclose(our_numbers[name], column, rtol=1e-5, atol=1e-5)
    assert our_reports == pytest.approx(reports, rel=1e-5, abs=1e-5)
    for name, of_model in weights.items():
        assert greatest_difference(our_weights[name], of_model) < 1e-5


@pytest.mark.parametrize(
    ("algorithm", "zero_stage"),
    matrix(
        ["PPO", "GRPO", "GRPO with adapters"],
        [0, 1, 2, 3],
        usual=[("PPO", 0), ("PPO", 3), ("GRPO", 2), ("GRPO with adapters", 1)],
    ),
)
def test_a_step_of_a_policy_is_that_of_one_rank(
    algorithm: str, zero_stage: int, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    """With forward passes of policy, critic and reference before it; with adapters the policy without them is the
    reference."""
    steps = []
    for world, size in ((1, 1), (2, 2)):
        section: dict[str, Any] = {**(PPO if algorithm == "PPO" else GRPO), "kl": {"coefficient": 0.1}}
        section["training"] = {"batch_size": 4}
        more: Any = {"critic": tiny_model(seed=3), "reference": tiny_model(seed=2)} if algorithm == "PPO" else {}
        if algorithm == "GRPO with adapters":
            section["training"] |= {"lora": {"r": 4}}
        layout: Any = {"zero_stage": zero_stage if world == 2 else 0, "max_tokens_per_microbatch": 64}
        with machines(world).trainers() as group, parts_of_logits(group):
            folder = tmp_path / str(world)
            policy = Policy(
                group, machines(world), tiny_model(), folder, section, sequence_parallel_size=size, **layout, **more
            )
            policy.open()
            data = sampled()
            policy.ranks.all(PolicyTrainer.load, data)
            columns = ["old_logps", "reference_logps", "old_values", "top_entropy"]
            numbers = policy.ranks.all(PolicyTrainer.forward, True, columns)[0]
            returns = {"returns": data.numbers["advantages"] + numbers.get("old_values", 0.0)}
            reports = averages(policy.ranks.all(PolicyTrainer.update, returns, 0.1))
            exported = ["policy", "critic"] if algorithm == "PPO" else ["policy"]
            steps.append((numbers, reports, {name: policy.export(name) for name in exported}))
    check_same_step(*steps)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_frozen_models_give_the_numbers_of_plain_transformers(
    zero_stage: int, machines: Any, tiny_model: Any, tables: Any, tmp_path: Path
) -> None:
    """Log-probabilities as references and scores, and a teacher's likeliest tokens."""
    folder = tiny_model(seed=2)
    table = tables["preference"]
    pairs = list(zip(table["prompt_ids"].to_pylist(), table["chosen_ids"].to_pylist(), strict=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for prompt, completion in pairs:
        with torch.no_grad():
            logps = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        expected.append(sum(float(logps[len(prompt) + n - 1, token]) for n, token in enumerate(completion)))
    resources = machines(2).resources.model_copy(update={"sequence_parallel_size": 2, "zero_stage": zero_stage})
    with machines(2).trainers() as group, parts_of_logits(group):
        ranks: Any = open_on(group, ForwardJob(Model(folder, MODEL), "lm"), resources)
        ((_, values),) = run_blocks(ranks, [(0, call(Forward.run, pairs))], resources)
        np.testing.assert_allclose(np.sum(values, axis=0), expected, rtol=1e-5)
        rows = Sft().rows(tables["sft"])
        ranks = open_on(group, TeacherJob(Model(folder, MODEL), 5, bf16=False), resources)
        ((_, predictions),) = run_blocks(ranks, [(0, call(Teacher.run, rows))], resources)
    likeliest = said_of(model, tables["sft"], 5)
    merged = {row: prediction for of_rank in predictions for row, prediction in of_rank.items()}
    assert merged.keys() == {*range(len(rows))}
    for row, (ids, logps) in merged.items():
        assert ids.flatten().tolist() == likeliest["teacher_ids"][row].as_py()
        np.testing.assert_allclose(logps.flatten(), likeliest["teacher_logps"][row].as_py(), atol=1e-5)


@pytest.mark.parametrize("progress_in", matrix(["store", "local"], usual=["store"]))
def test_a_job_resumes_with_another_number_of_ranks_in_a_group(
    progress_in: str, jobs: Any, machines: Any, tmp_path: Path
) -> None:
    """From 2 ranks in a group to 2 alone, and in the store's form to one rank and back."""
    job, progress = jobs("sft"), tmp_path / "progress"
    layouts = [(2, 2), (2, 1), (2, 2)] if progress_in == "local" else [(2, 2), (1, 1), (2, 2), (2, 1)]
    for step, (world, size) in enumerate(layouts):
        with machines(world).trainers() as group:
            more: Any = {"sequence_parallel_size": size, "progress": progress_in, "zero_stage": 2}
            ranks, state = opened(group, machines(world), job, progress, **more)
            assert state["step"] == step
            train(ranks, 1)
            save_progress([ranks], progress)
            weights = load_file(export(ranks, tmp_path / f"step-{step}"))
    exact = result(machines, job, tmp_path / "exact", len(layouts), world=1)
    assert greatest_difference(weights, exact.weights) < 1e-5
