"""KTO with real stages: the reference's log-probabilities of mismatched completions, shared stages, warnings, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.artifacts import Reference
from alignment_core.composition.graph import composing
from alignment_core.composition.steps import kto
from alignment_core.errors import DataError
from alignment_core.recipes import TrainingConfig
from alignment_core.recipes.sections.kto import KtoLossConfig
from alignment_core.stages.kto import imbalance
from alignment_core.training.kto_mismatch import mismatched
from tests.composed import Runs
from tests.stages.killing import store_with
from tests.stages.test_reference_logps import expected


def labelled(prompts: list[list[int]], label: Any = lambda number: number % 2 == 0) -> pa.Table:
    random = np.random.default_rng(3)
    completions = [random.integers(0, 256, random.integers(2, 9)).tolist() for _ in prompts]
    labels = [label(number) for number in range(len(prompts))]
    return pa.table({"prompt_ids": prompts, "completion_ids": completions, "label": labels})


@pytest.fixture
def started(machines: Any, tiny_model: Any, tmp_path: Path) -> Iterator[Any]:
    """Starts a run with rows as its data: the run, a model and the data set."""
    stack = ExitStack()

    def start(name: str, rows: pa.Table) -> tuple[Runs, Reference, Reference]:
        store, model, data = store_with(tmp_path / name, tiny_model(), rows)
        run = Runs(store, machines(1))
        stack.enter_context(composing(run))
        return run, model, data

    with stack:
        yield start


@pytest.mark.slow
def test_kto_uses_reference_logps_of_matched_and_mismatched_rows(started: Any, tiny_model: Any) -> None:
    rows = labelled([[number % 5, 7, 7] for number in range(14)], lambda number: number > 8)
    run, model, data = started("rows", rows)
    training = TrainingConfig(batch_size=6, learning_rate=1e-3)
    results = []
    for loss in (
        KtoLossConfig(),
        KtoLossConfig(beta=0.3, desirable_weight=1.8),
        KtoLossConfig(loss_type="apo_zero_unpaired"),
    ):
        kto("kto", training, loss, model, data)
        results.append([run.results[label] for label in ("kto/reference-logps", "kto")])
    assert [[result.state for result in pair] for pair in results] == [
        ["run", "run"],
        ["cached", "run"],
        ["run", "run"],
    ]

    first, weighted = results[0][1], results[1][1]
    assert first.metrics["loss.first"] == pytest.approx(0.5, abs=1e-3), "at the reference: 1 - σ(0)"
    assert (first.metrics["desirable_rows"], first.metrics["undesirable_rows"]) == (5, 9)
    assert first.warnings == [
        "5 desirable and 9 undesirable rows weigh 0.556 to 1, and KTO's authors advise between 1 and 3/2: set "
        "kto.loss.desirable_weight between 1.8 and 2.7, or undesirable_weight to the same effect"
    ]
    assert weighted.warnings == []

    logps = pq.read_table(run.store.fetch(results[0][0].reference) / "logps.parquet").to_pydict()
    others = mismatched(*(rows[name].to_pylist() for name in ("prompt_ids", "completion_ids")))
    sides = {"chosen_ids": rows["completion_ids"].to_pylist(), "rejected_ids": others}
    plain = expected(tiny_model(), pa.table({"prompt_ids": rows["prompt_ids"], **sides}))
    np.testing.assert_allclose(logps["completion_logp"], plain[:, 0], rtol=1e-5)
    np.testing.assert_allclose(logps["mismatched_logp"], plain[:, 1], rtol=1e-5)
    alone = pq.read_table(run.store.fetch(results[2][0].reference) / "logps.parquet")
    assert alone.column_names == ["split", "row", "completion_logp"]

    run, model, data = started("one prompt", labelled([[1, 2]] * 4))
    with pytest.raises(DataError, match="all 4 train rows have the same prompt"):
        kto("kto", training, KtoLossConfig(), model, data)
    kto("kto", training, KtoLossConfig(loss_type="apo_zero_unpaired"), model, data)
    assert run.results["kto"].metrics["steps"] == 1


@pytest.mark.parametrize(
    ("rows", "loss", "says"),
    [
        ((10, 10), {}, None),
        ((97, 100), {}, None),
        ((15, 10), {}, None),
        ((16, 10), {}, "between 0.625 and 0.938"),
        ((20, 10), {}, "between 0.5 and 0.75"),
        ((20, 10), {"undesirable_weight": 2.0}, None),
        ((10, 20), {}, "between 2 and 3"),
        ((10, 0), {}, "no row is undesirable: .* more likely .*; add undesirable rows"),
        ((0, 10), {}, "no row is desirable: .* less likely .*; add desirable rows"),
    ],
)
def test_labels_whose_weights_the_authors_advise_against_are_warned_of(rows: Any, loss: Any, says: str | None) -> None:
    warnings = imbalance(rows[0], rows[1], KtoLossConfig(**loss))
    assert len(warnings) == (says is not None)
    if says is not None:
        assert re.search(says, warnings[0])
