"""The load-balancing loss of a mixture of experts: its value in every kind of training, and its part in a step."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.errors import UserError
from alignment_core.models.loading import Head, load_model
from alignment_core.models.microbatch import Row, cut, pack
from alignment_core.models.model_ref import Model
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes import DpoLossConfig
from alignment_core.recipes.sections.training import TrainingConfig
from alignment_core.training.methods.dpo import Dpo
from alignment_core.training.methods.reward_model import RewardModel
from alignment_core.training.methods.sft import Sft
from alignment_core.training.step_data import StepData
from tests.training.conftest import MODEL
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, train


def sampled(preferences: pa.Table) -> list[Row]:
    """A step's completions: those of the preferred answers."""
    rows = [row for row in preferences.to_pylist() if row["chosen_ids"]]
    prompts, completions = ([row[name] for row in rows] for name in ("prompt_ids", "chosen_ids"))
    return StepData.of(prompts, completions, [[True] * len(ids) for ids in completions]).rows()


MakeMixture = Callable[[str], Path]
KINDS: dict[str, tuple[Head, str, Callable[[Any], Sequence[Row]]]] = {
    "sft": ("lm", "sft", Sft().rows),
    "dpo": ("lm", "preference", Dpo(DpoLossConfig()).rows),
    "reward model": ("score", "preference", RewardModel().rows),
    "policy": ("lm", "preference", sampled),
    "critic": ("value", "preference", sampled),
}
"""Head, table and rows of every method that trains a model."""


def of_the_equation(model: Any, rows: Sequence[Row]) -> float:
    """``E Σ_e f_e P_e``: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, over tokens and layers together.

    ``f_e`` is how often a token takes expert ``e`` (two experts each, so that they sum to 2), ``P_e`` the mean
    probability that the router gives it. Each sequence goes through plain ``transformers`` alone.
    """
    taken, probability, count = torch.zeros(4), torch.zeros(4), 0
    for sequence in (sequence for row in rows for sequence in row.sequences):
        with torch.no_grad():
            output = model.base_model(torch.from_numpy(sequence.ids)[None], output_router_logits=True)
        for logits in output.router_logits:
            for token in logits.softmax(-1):
                taken[token.argsort(descending=True)[:2]] += 1
                probability += token
                count += 1
    return float(4 * (taken / count * probability / count).sum())


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [True, False], ids=["trees", "lines"])
def test_the_loss_of_a_pack_is_that_of_the_equation(
    share: bool, kind: str, architecture: str, tables: Any, mixture_model: MakeMixture
) -> None:
    head, table, rows_of = KINDS[kind]
    rows = rows_of(tables[table])[:5]
    model = load_model(str(mixture_model(architecture)), head, torch.float32, head_seed=7)
    if share:  # each token counts as often as a sequence has it
        rows = [*rows, *(dataclasses.replace(row, number=row.number + 5) for row in rows[:3])]
    packed, micro = PackedModel(model, head, share_prefixes=share).train(), pack(rows, share_prefixes=share)
    assert int(micro.multiplicity.sum()) == sum(row.tokens for row in rows)
    assert (micro.multiplicity.numel() < micro.multiplicity.sum()) if share else (0 in micro.multiplicity), (
        "lines are filled"
    )
    without = run_packed(packed, micro)
    assert packed.router_loss is None
    packed.balance_routers()
    assert torch.equal(run_packed(packed, micro), without)
    assert packed.router_loss is not None
    assert float(packed.router_loss) == pytest.approx(of_the_equation(model, rows), rel=1e-5)
    run_packed(packed, pack([], share_prefixes=share))
    assert bool(packed.router_loss.isfinite()), "a rank may get an empty pack"


def with_coefficient(folder: Path, coefficient: float | None, to: Path) -> Path:
    """A copy of a model with this ``router_aux_loss_coef`` in its configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "router_aux_loss_coef": coefficient}))
    return to


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_by_default_the_coefficient_and_the_loss_are_those_of_transformers(
    architecture: str, tables: Any, mixture_model: MakeMixture, tmp_path: Path
) -> None:
    """``transformers`` adds the loss with the coefficient of the model's configuration if it returns router logits."""
    folder = mixture_model(architecture)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    row = Sft().rows(tables["sft"])[0]
    ids = torch.tensor(row.sequences[0].ids)[None]
    with torch.no_grad():
        losses = [float(plain(ids, labels=ids, output_router_logits=routers).loss) for routers in (True, False)]
    packed = PackedModel(load_model(str(folder), "lm", torch.float32), "lm", share_prefixes=False).train()
    packed.balance_routers()
    run_packed(packed, pack([row], share_prefixes=False))
    assert packed.router_aux_loss_coef == 0.001, "the default of both architectures"
    assert packed.router_aux_loss_coef * float(packed.router_loss) == pytest.approx(losses[0] - losses[1], rel=2e-3)  # type: ignore[arg-type]
    for coefficient, used in ((0.03, 0.03), (0.0, 0.0)):
        other = with_coefficient(folder, coefficient, tmp_path / str(coefficient))
        assert PackedModel(load_model(str(other), "lm", torch.float32), "lm").router_aux_loss_coef == used
    assert PackedModel(load_model(str(folder), "score", torch.float32, head_seed=7), "score").router_aux_loss_coef == 0


def test_models_without_routers_have_no_coefficient(tiny_model: Any) -> None:
    model = load_model(str(tiny_model()), "lm", torch.float32)
    assert PackedModel(model, "lm").router_aux_loss_coef == 0
    model.config.router_aux_loss_coef = 0.5
    assert PackedModel(model, "lm").router_aux_loss_coef == 0, "a field of the configuration alone is no router"


def test_stored_sections_of_earlier_versions_have_no_loss_of_routers() -> None:
    """Their dumps left the field out while it was 0."""
    stored = TrainingConfig(learning_rate=1e-6).model_dump(mode="json")
    assert stored.pop("router_aux_loss_coef") is None
    assert TrainingConfig.model_validate(stored).router_aux_loss_coef == 0
    assert TrainingConfig.model_validate({"learning_rate": 1e-6}).router_aux_loss_coef is None
    assert TrainingConfig.model_validate({**stored, "router_aux_loss_coef": None}).router_aux_loss_coef is None


@pytest.mark.slow
@pytest.mark.parametrize(("world", "zero_stage", "budget"), [(1, 0, 4096), (2, 1, 128), (2, 3, 128)])
def test_a_step_adds_the_loss_of_its_packs_by_their_tokens(
    world: int, zero_stage: int, budget: int, make_job: Any, machines: Any, mixture_model: MakeMixture, tmp_path: Path
) -> None:
    """With one trainer, the coefficient is that of the model's configuration."""
    coefficient = 0.5
    given = {"router_aux_loss_coef": coefficient} if world > 1 else {}
    settings = {"batch_size": 14, "num_train_epochs": 1, "max_grad_norm": 1e6, **given}
    folder = mixture_model("mixtral")
    folder = folder if given else with_coefficient(folder, coefficient, tmp_path / "model")
    job = dataclasses.replace(make_job(Sft(), **settings), model=Model(folder, MODEL))
    with machines(world).trainers() as group:
        ranks = open_job(
            group, machines(world), job, tmp_path / "run", zero_stage=zero_stage, max_tokens_per_microbatch=budget
        )
        reports = train(ranks, 1)
        trained = load_file(export(ranks, tmp_path / "trained"))

    model = load_model(str(job.model.path), "lm", torch.float32)
    rows = Sft().rows(pq.read_table(job.train_data))
    packed, aux_loss = PackedModel(model, "lm").train(), 0.0
    packed.balance_routers()
    optimizer = torch.optim.AdamW(packed.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    for part in (part for rank in cut(rows, world, budget) for part in rank if part):
        logps = run_packed(packed, pack(part))
        share = packed.router_loss * sum(row.tokens for row in part) / sum(row.tokens for row in rows)  # type: ignore[operator]
        (-logps.sum() / Sft().normaliser(rows) + coefficient * share).backward()
        aux_loss += float(share)
    norm = torch.nn.utils.get_total_norm([p.grad for p in packed.parameters() if p.grad is not None])
    optimizer.step()
    normaliser = sum(report.normaliser for report in reports)
    assert sum(report.sums["aux_loss"] for report in reports) / normaliser == pytest.approx(aux_loss, rel=1e-5)
    assert reports[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
    model.save_pretrained(tmp_path / "expected")
    assert greatest_difference(load_file(tmp_path / "expected" / "model.safetensors"), trained) < 1e-5


def test_a_model_without_routers_is_refused(make_job: Any, machines: Any, tmp_path: Path) -> None:
    job = make_job(Sft(), router_aux_loss_coef=0.01)
    with (
        machines(1).trainers() as group,
        pytest.raises(
            UserError, match=r"training\.router_aux_loss_coef: a llama model has no routers .* leave it at 0"
        ),
    ):
        open_job(group, machines(1), job, tmp_path / "progress")


def test_a_dense_model_of_a_family_with_experts_has_no_coefficient() -> None:
    """Granite 4's dense models have a coefficient, and no layer of experts; the forward pass of ``transformers`` ends in an
    error when it is asked for router logits."""
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        shared_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        layer_types=["attention", "attention"],
        mamba_n_heads=2,
        mamba_d_head=32,
    )
    assert config.router_aux_loss_coef == 0.001
    model = transformers.GraniteMoeHybridForCausalLM(config)
    packed = PackedModel(model, "lm", share_prefixes=False)
    assert packed.router_aux_loss_coef == 0
    with pytest.raises(UserError, match="has no routers whose load could be balanced"):
        packed.balance_routers()
