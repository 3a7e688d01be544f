"""Distillation on real ranks: teacher and student against plain transformers, for any packs, ranks and prefixes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from alignment_core.composition.graph import composing, submit
from alignment_core.data.row_order import as_stored, is_shuffled
from alignment_core.errors import DataError
from alignment_core.models.microbatch import cut, pack
from alignment_core.models.packed import PackedModel, run_packed
from alignment_core.recipes.sections.distillation import DistillationLossConfig
from alignment_core.stages import teacher_logps
from alignment_core.stages.teacher_logps import TeacherLogpsConfig
from alignment_core.training.methods.distillation import Distillation
from alignment_core.training.resumable import save_progress
from tests.composed import Runs
from tests.stages.killing import store_with
from tests.training.test_batch_invariance import padded_forward
from tests.training.test_trainer_ranks import export, greatest_difference, open_job, train, trained

TOP = 5


def said_of(model: Any, table: pa.Table, top: int) -> pa.Table:
    """The table with log-probabilities of ``model``, by plain padded passes."""
    rows = Distillation.__mro__[1].rows(Distillation(DistillationLossConfig()), table)  # type: ignore[attr-defined]
    ids, logps = [], []
    with torch.no_grad():
        for row in rows:
            logps_TV = padded_forward(model, [row])[0].log_softmax(-1)
            best = logps_TV[torch.tensor(row.sequences[0].targets.nonzero()[0]) - 1].topk(top)
            ids.append(best.indices.flatten().tolist())
            logps.append(best.values.flatten().tolist())
    return table.append_column("teacher_ids", pa.array(ids, pa.list_(pa.int32()))).append_column(
        "teacher_logps", pa.array(logps, pa.list_(pa.float32()))
    )


@pytest.fixture
def models(tiny_model: Any) -> tuple[Any, Any]:
    """Student and teacher."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(tiny_model()), load(tiny_model(seed=2))


@pytest.mark.parametrize("name", ["sft", "sft, alike"])
@pytest.mark.parametrize(
    "config",
    [
        {"divergence": "forward_kl"},
        {"divergence": "reverse_kl"},
        {"divergence": "jsd", "jsd_beta": 0.3, "nll_weight": 0.5},
    ],
    ids=["forward", "reverse", "jsd with nll"],
)
def test_distillation_over_the_whole_vocabulary_is_the_divergence_of_plain_models_in_every_packing(
    models: Any, tables: Any, name: str, config: dict[str, Any]
) -> None:
    student, teacher = models
    vocabulary = student.config.vocab_size
    table = said_of(teacher, tables[name], vocabulary)
    method = Distillation(DistillationLossConfig(**config))
    rows = method.rows(table)
    losses = []
    for row in rows:
        at = torch.tensor(row.sequences[0].targets.nonzero()[0])
        q_KV = padded_forward(student, [row])[0, at - 1].log_softmax(-1)
        with torch.no_grad():
            p_KV = padded_forward(teacher, [row])[0, at - 1].log_softmax(-1)
        if config["divergence"] == "forward_kl":
            divergence = (p_KV.exp() * (p_KV - q_KV)).sum()
        elif config["divergence"] == "reverse_kl":
            divergence = (q_KV.exp() * (q_KV - p_KV)).sum()
        else:
            m_KV = (0.3 * p_KV.exp() + 0.7 * q_KV.exp()).log()
            divergence = 0.3 * (p_KV.exp() * (p_KV - m_KV)).sum() + 0.7 * (q_KV.exp() * (q_KV - m_KV)).sum()
            divergence = divergence - 0.5 * q_KV[range(len(at)), row.sequences[0].ids[at]].sum()
        losses.append(divergence)
    plain = torch.stack(losses).sum() / method.normaliser(rows)
    plain.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
    for share, budget in ((True, 4000), (True, 64), (False, 100)):
        student.zero_grad()
        packed, total = PackedModel(student, "lm", share_prefixes=share), 0.0
        for part in cut(rows, 1, budget, share)[0]:
            batch = pack(part, share_prefixes=share)
            loss, _ = method.loss(run_packed(packed, batch), batch, None)
            (loss / method.normaliser(rows)).backward()
            total += float(loss.detach()) / method.normaliser(rows)
        gradient = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])
        assert total == pytest.approx(plain.item(), rel=1e-4)
        assert (gradient - expected).norm() < 1e-3 * expected.norm(), "of the rest of 1e-7, and rounding"


def test_ranks_sharding_and_micro_batches_change_nothing_and_a_resumed_job_ends_in_the_same_bytes(
    models: Any, tables: Any, make_job: Any, machines: Any, tmp_path: Path
) -> None:
    table = said_of(models[1], tables["sft"], TOP)
    job, progress = make_job(Distillation(DistillationLossConfig(divergence="jsd")), table), tmp_path / "progress"
    single = trained(machines(1), job, tmp_path / "one")
    for stage in (0, 2, 3):
        two = trained(machines(2), job, tmp_path / f"{stage}", max_tokens_per_microbatch=32, zero_stage=stage)
        assert greatest_difference(single, two) < 1e-5
    with machines(1).trainers() as group:
        ranks = open_job(group, machines(1), job, progress)
        train(ranks, 3)
        save_progress([ranks], progress)
        train(ranks, 3)
        whole = export(ranks, tmp_path / "whole").read_bytes()
        ranks = open_job(group, machines(1), job, progress)
        train(ranks, 3)
        assert export(ranks, tmp_path / "resumed").read_bytes() == whole


def test_a_teacher_runs_once_for_all_students(
    models: Any, tables: Any, machines: Any, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_logps, "BLOCK", 4)
    store, teacher, data = store_with(tmp_path, tiny_model(seed=2), tables["sft"])
    run = Runs(store, machines(2))
    config = TeacherLogpsConfig(top_k=TOP)
    with composing(run):
        for label in ("one", "other"):
            submit("teacher_logps", label, config, {"model": teacher, "data": data})
    assert [run.results[label].state for label in ("one", "other")] == ["run", "cached"]
    table = pq.read_table(store.fetch(run.results["one"].reference) / "train.parquet")
    expected = said_of(models[1], tables["sft"], TOP)
    assert table["teacher_ids"].to_pylist() == expected["teacher_ids"].to_pylist()
    for mine, plain in zip(table["teacher_logps"].to_pylist(), expected["teacher_logps"].to_pylist(), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)
    assert table["input_ids"].to_pylist() == tables["sft"]["input_ids"].to_pylist()


def test_rows_with_predictions_are_written_and_read_block_by_block(tmp_path: Path) -> None:
    """3,000 rows of three tokens, of which the last two are targets with two candidates each."""
    data, progress, output = (tmp_path / name for name in ("data", "progress", "output"))
    for folder in (data, progress, output):
        folder.mkdir()
    numbers = range(3000)
    columns = {
        "input_ids": pa.array([[n, n + 1, n + 2] for n in numbers], pa.list_(pa.int32())),
        "loss_mask": pa.array([[0, 1, 1] for _ in numbers], pa.list_(pa.int8())),
        "text": pa.array([f"row {n}" for n in numbers]),
    }
    table = pa.table(columns, as_stored(pa.table(columns).schema))
    pq.write_table(table, data / "train.parquet")
    size = teacher_logps.BLOCK
    for part in range(-(-len(numbers) // size)):
        block = numbers[part * size : (part + 1) * size]
        ids = np.array([[10 * n + place, 10 * n + place + 5] for n in block for place in (1, 2)], np.int32)
        np.savez(progress / f"train-{part:06d}.npz", ids=ids, logps=-ids.astype(np.float32))
    no_trainers = SimpleNamespace(trainers=lambda ticket: nullcontext())
    context: Any = SimpleNamespace(
        inputs={"data": data}, progress=progress, output=output, ticket=None, machines=no_trainers
    )
    assert teacher_logps.run(context, TeacherLogpsConfig(top_k=2)) == {"rows": 3000, "train_rows": 3000}
    with pq.ParquetFile(output / "train.parquet") as file:
        assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [1000, 1000, 1000]
        written = file.read()
    assert written.select(table.column_names).equals(table)
    assert not is_shuffled(written.schema)
    expected = [[10 * n + 1, 10 * n + 6, 10 * n + 2, 10 * n + 7] for n in numbers]
    assert written["teacher_ids"].to_pylist() == expected
    assert written["teacher_logps"].to_pylist() == [[-id for id in row] for row in expected]
    (row,) = Distillation(DistillationLossConfig()).rows(written.slice(1500, 1))
    (sequence,) = row.sequences
    assert sequence.candidates is not None
    assert sequence.candidate_values is not None
    assert (sequence.candidates.dtype, sequence.candidate_values.dtype) == (np.int32, np.float32)
    assert sequence.candidates.tolist() == [[15001, 15006], [15002, 15007]]
    assert sequence.candidate_values.tolist() == [[-15001, -15006], [-15002, -15007]]
    packed = pack([row]).candidates_KC
    assert packed is not None
    assert packed.dtype == torch.int64, "as gathering takes them"


def test_a_data_set_without_rows_is_refused(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(inputs={"data": tmp_path})
    with pytest.raises(DataError, match="holds no training rows"):
        teacher_logps.run(context, TeacherLogpsConfig(top_k=TOP))
