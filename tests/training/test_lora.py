"""LoRA on real DeepSpeed ranks: the same adapters for any layout of training, and whole models of the merged adapters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.canonical import derive_seed
from alignment_core.errors import UserError
from alignment_core.recipes import DpoLossConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.policy_trainer import PolicyTrainer
from alignment_core.training.resumable import save_progress
from alignment_core.training.training_rows import batch_of_step
from tests.matrix import cases, matrix
from tests.training.test_policy_ranks import Policy, sampled
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, opened, train, trained

pytestmark = pytest.mark.slow

LORA = {"r": 4, "lora_alpha": 8}
WHOLE = {"modules_to_save": ["embed_tokens"]}
IN_4_BITS = {"load_in_4bit": True}
IN_8_BITS = {"load_in_8bit": True}
DPO = Dpo(DpoLossConfig(beta=0.3, nll_weight=0.2))


def loss_of_step(job: Any, table: Any, step: int, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The mean cross entropy of the completion tokens of a batch of 6 of 14 rows, row by row; ``logits_of`` ids [1, T]."""
    total, tokens = torch.zeros(()), 0
    for number in batch_of_step(step, 14, 6, job.seed):
        ids = torch.tensor(table["input_ids"][int(number)].as_py())
        mask = torch.tensor(table["loss_mask"][int(number)].as_py(), dtype=torch.bool)
        logits = logits_of(ids[None])[0]
        total = total - torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0][mask[1:]].sum()
        tokens += int(mask[1:].sum())
    return total / tokens


def expected_of_two_steps(job: Any, table: Any) -> dict[str, torch.Tensor]:
    """Two steps of fine-tuning in plain torch, row by row: W + 2 B A in the place of each adapted weight."""
    from alignment_core.models.adapters import add_adapters

    model = transformers.AutoModelForCausalLM.from_pretrained(job.model.path)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapters(model, model.lm_head, job.training.lora, derive_seed(job.seed, "adapters"), train_head=False)
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    layers = [name.removesuffix(".lora_A.default.weight") for name in initial if name.endswith("lora_A.default.weight")]
    assert len(layers) == 14, "seven in each of two blocks"
    a = {name: initial[f"{name}.lora_A.default.weight"].requires_grad_() for name in layers}
    b = {name: initial[f"{name}.lora_B.default.weight"].requires_grad_() for name in layers}
    assert all(parameter.abs().max() > 0 for parameter in a.values())
    assert all(parameter.abs().max() == 0 for parameter in b.values())

    model = transformers.AutoModelForCausalLM.from_pretrained(job.model.path)
    optimizer = torch.optim.AdamW([*a.values(), *b.values()], lr=1e-3, eps=1e-5, weight_decay=0.1)

    def weights() -> dict[str, torch.Tensor]:
        return {f"{name}.weight": plain[f"{name}.weight"] + 2.0 * (b[name] @ a[name]) for name in layers}

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights(), (ids,)).logits

    for step in range(2):
        optimizer.zero_grad()
        loss_of_step(job, table, step, logits_of).backward()
        torch.nn.utils.clip_grad_norm_([*a.values(), *b.values()], 1.0)
        optimizer.step()
    return plain | {name: parameter.detach() for name, parameter in weights().items()}


def test_steps_equal_plain_torch(make_job: Any, machines: Any, tables: Any, tmp_path: Path) -> None:
    job = make_job(Sft(), lora=LORA, lr_scheduler_type="constant", weight_decay=0.1)
    before = load_file(job.model.path / "model.safetensors")
    expected = expected_of_two_steps(job, tables["sft"])
    weights_found = trained(machines(1), job, tmp_path / "one", steps=2)
    assert max(float((weights_found[name] - before[name]).abs().max()) for name in weights_found) > 1e-3
    assert max(float((weights_found[name] - expected[name]).abs().max()) for name in weights_found) < 1e-6
    frozen = [name for name in weights_found if "proj" not in name]
    assert len(frozen) == 6, "embeddings and norms"
    assert all(torch.equal(weights_found[name], before[name]) for name in frozen)


@pytest.mark.parametrize(
    ("method", "lora"),
    [
        pytest.param(Sft(), LORA, id="sft", marks=pytest.mark.exhaustive),
        pytest.param(RewardModel(), LORA, id="reward model", marks=pytest.mark.exhaustive),
        pytest.param(DPO, LORA, id="dpo"),
        pytest.param(Sft(), LORA | {"use_dora": True}, id="sft, DoRA"),
        pytest.param(Sft(), LORA | WHOLE, id="sft, embeddings", marks=pytest.mark.exhaustive),
        pytest.param(RewardModel(), LORA | IN_4_BITS, id="reward model, 4 bits"),
        pytest.param(Sft(), LORA | IN_4_BITS, id="sft, 4 bits", marks=pytest.mark.exhaustive),
        pytest.param(DPO, LORA | IN_8_BITS, id="dpo, 8 bits", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_sharding_and_micro_batches_do_not_change_the_result(
    method: Any, lora: Any, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    job = make_job(method, lora=lora)
    single = trained(machines(1), job, tmp_path / "one")
    before = load_file(job.model.path / "model.safetensors")
    assert max(float((single[name] - before[name]).abs().max()) for name in before if name in single) > 1e-4
    for stage in (0, 1, 2) if {"load_in_4bit", "load_in_8bit"} & lora.keys() else (0, 1, 2, 3):
        both = trained(
            machines(2),
            job,
            tmp_path / f"both-{stage}",
            zero_stage=stage,
            max_tokens_per_microbatch=[32, 4096][stage % 2],
        )
        assert greatest_difference(single, both) < 1e-5
    checkpointed = trained(machines(1), job, tmp_path / "checkpointed", gradient_checkpointing=True)
    assert greatest_difference(single, checkpointed) < 1e-5


@pytest.mark.parametrize("zero_stage", matrix([0, 1, 2, 3], usual=[1, 3]))
def test_bf16_learns_as_fp32_does_up_to_its_rounding(
    zero_stage: int, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    lora = {"r": 4, "lora_alpha": 256}  # so that weights move by more than bf16 rounds
    job = make_job(Sft(), lora=lora)
    before = load_file(job.model.path / "model.safetensors")
    exact = trained(machines(1), job, tmp_path / "fp32")
    rough = trained(machines(2), make_job(Sft(), lora=lora, bf16=True), tmp_path / "bf16", zero_stage=zero_stage)
    assert {tensor.dtype for tensor in rough.values()} == {torch.bfloat16}
    adapted = [name for name in exact if "proj" in name]
    moved = torch.cat([(exact[name] - before[name]).flatten() for name in adapted])
    moved_roughly = torch.cat([(rough[name].float() - before[name].bfloat16().float()).flatten() for name in adapted])
    assert torch.nn.functional.cosine_similarity(moved, moved_roughly, dim=0) > 0.9


@pytest.mark.parametrize(
    ("zero_stage", "bf16", "more"),
    cases(
        [
            *((0, False, {}), (1, False, {}), (2, True, {}), (3, False, {}), (0, True, {}), (3, True, {})),
            *((0, False, {"use_dora": True}), (3, True, {"use_dora": True}), (0, False, WHOLE), (3, True, WHOLE)),
            *((0, False, IN_4_BITS), (2, True, IN_4_BITS), (0, False, IN_8_BITS), (2, True, IN_8_BITS)),
        ],
        usual=[
            (1, False, {}),
            (3, True, {"use_dora": True}),
            (3, True, WHOLE),
            (2, True, IN_4_BITS),
            (0, False, IN_8_BITS),
        ],
    ),
)
def test_a_job_resumed_from_a_checkpoint_of_trained_parameters_ends_in_the_same_bytes(
    zero_stage: int, bf16: bool, more: dict[str, Any], make_job: Any, machines: Any, tmp_path: Path
) -> None:
    lora = LORA | more
    job, progress = make_job(RewardModel(), lora=lora, bf16=bf16), tmp_path / "progress"
    with machines(2).trainers() as group:
        ranks = open_job(group, machines(2), job, progress, zero_stage=zero_stage)
        train(ranks, 3)
        save_progress([ranks], progress)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks, state = opened(group, machines(2), job, progress, zero_stage=zero_stage)
        assert state["step"] == 3
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole
    size = sum(file.stat().st_size for file in (progress / "step-00000003").rglob("*") if file.is_file())
    parameters = sum(parameter.numel() for parameter in load_file(tmp_path / "whole" / "model.safetensors").values())
    assert size < 6 * parameters, "one of all weights takes 12 bytes for each, with the optimiser's moments"


@pytest.mark.parametrize("more", [{}, IN_8_BITS], ids=["whole", "8 bits"])
def test_fine_tuning_lowers_the_loss(more: dict[str, Any], make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(Sft(), lora=LORA | more, learning_rate=1e-2, num_train_epochs=10)
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, tmp_path / "progress")
        losses = []
        for _ in range(30):
            [report] = train(ranks, 1)
            losses.append(report.sums["loss"] / report.normaliser)
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.3


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_3_is_refused_with_quantized_weights(bits: int, make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(Sft(), lora={f"load_in_{bits}bit": True})
    with (
        machines(2).trainers() as group,
        pytest.raises(
            UserError, match=rf"^training\.lora\.load_in_{bits}bit: ZeRO 3 .* set resources\.zero_stage to 2"
        ),
    ):
        open_job(group, machines(2), job, tmp_path / "progress", zero_stage=3)


def test_unknown_target_layers_are_the_users_error(make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(Sft(), lora={"target_modules": ["q_proj", "query"]})
    with (
        machines(1).trainers() as group,
        pytest.raises(
            UserError, match=r"training\.lora\.target_modules: .* no linear layer 'query'; it has down_proj, "
        ),
    ):
        open_job(group, machines(1), job, tmp_path / "progress")


@pytest.mark.parametrize(
    ("zero_stage", "bf16", "whole"),
    cases(
        [(0, False, {}), (2, False, {}), (3, False, {}), (0, True, {}), (3, True, {}), (0, False, WHOLE)],
        usual=[(2, False, {}), (3, True, {}), (0, False, WHOLE)],
    ),
)
def test_the_reference_of_a_policy_is_the_policy_without_its_adapters(
    zero_stage: int, bf16: bool, whole: dict[str, Any], machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    data, logps = sampled(), {}
    model = tmp_path / "model"
    shutil.copytree(tiny_model(), model)
    for lora in (None, {"r": 4, "lora_alpha": 64} | whole):
        section = {
            "kl": {"coefficient": 0.1},
            "loss": {"entropy_coef": 0.01},
            "training": {"bf16": bf16, "lora": lora},
        }
        with machines(2).trainers() as group:
            policy = Policy(group, machines(2), model, tmp_path / str(bool(lora)), section, zero_stage=zero_stage)
            policy.open()
            for _ in range(2):
                policy.logps(data)
                policy.ranks.all(PolicyTrainer.update, {}, 0.1)
            logps[bool(lora)] = policy.logps(data)
    copy, own = logps[False]["reference_logps"], logps[True]["reference_logps"]
    assert copy.all(), "each token has its number"
    np.testing.assert_array_equal(own, copy)
    moved = np.split(abs(logps[True]["old_logps"] - copy), data.starts_K[1:-1])
    assert min(difference.max() for difference in moved) > 1e-3, "the policy itself has moved"


@pytest.mark.parametrize(
    ("zero_stage", "bf16"),
    cases(
        [(0, False), (1, False), (2, True), (3, False), (0, True), (3, True)], usual=[(0, False), (2, True), (3, True)]
    ),
)
def test_the_moving_average_is_of_the_adapters_and_survives_a_stop(
    zero_stage: int, bf16: bool, machines: Any, tiny_model: Any, tmp_path: Path
) -> None:
    # In the first step B, which is zero, moves alone: A's gradient is B's product with something. So the average of the
    # adapters, with half of the first step's B, is half of the way of the weights, too.
    section = {"ema": {"decay": 0.5}, "training": {"bf16": bf16, "lora": {"r": 4, "lora_alpha": 256}}}
    with machines(2).trainers() as group:
        policy = Policy(group, machines(2), tiny_model(), tmp_path / "run", section, zero_stage=zero_stage)
        policy.open()
        before = policy.export("policy")
        initial = policy.export("average")
        assert all(torch.equal(initial[name], before[name]) for name in before)
        policy.learn(sampled())
        after, average = policy.export("policy"), policy.export("average")
        assert {parameter.dtype for parameter in average.values()} == {torch.bfloat16 if bf16 else torch.float32}
        rounding = 0.02 if bf16 else 1e-6
        for name, weight in average.items():
            half = (before[name].double() + after[name].double()) / 2
            assert float((weight.double() - half).abs().max()) <= rounding * float(half.abs().max()), name
        assert greatest_difference(before, average) > 1e-3
        again = policy.export("policy")
        assert all(torch.equal(again[name], after[name]) for name in after), "it leaves the weights alone"

        policy.save()
        policy.learn(sampled())
        expected = policy.export("average")
        assert policy.open() == 1
        policy.learn(sampled())
        resumed = policy.export("average")
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
