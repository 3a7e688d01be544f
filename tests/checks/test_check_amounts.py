"""Warnings about data sets whose rows are too long, or too few for training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checks.recipes import look, sft


@pytest.fixture
def trained(store: Any, rows: Path, tiny_model: Any) -> Any:
    """The warnings about 100 rows for a model that is not made from scratch."""

    def warnings(training: dict[str, Any] | None = None, **data: Any) -> list[str]:
        recipe = sft(rows, **data) | {"model": {"name": str(tiny_model())}}
        recipe["sft"] |= {"training": training or {}}
        return look(store, recipe).warnings

    return warnings


@pytest.mark.parametrize(
    ("training", "steps"),
    [
        ({"batch_size": 32}, 4),  # 100 / 32, rounded up
        ({"batch_size": 32, "num_train_epochs": 7}, 28),
        ({"batch_size": 32, "num_train_epochs": 8}, None),  # 32
        ({"batch_size": 3}, None),  # 34
        ({"batch_size": 32, "max_steps": 2}, None),  # a choice
    ],
)
def test_one_epoch_of_few_steps_is_warned_about(training: dict[str, Any], steps: int | None, trained: Any) -> None:
    warnings = trained(training)
    assert [f"are {steps} optimiser steps" in sentence for sentence in warnings] == ([True] if steps else [])
    assert all(sentence.startswith("sft: 100 rows with a batch_size of 32") for sentence in warnings)


def test_rows_that_are_held_out_are_not_trained_on(trained: Any) -> None:
    (sentence,) = trained({"batch_size": 1, "num_train_epochs": 1}, test_rows=75)
    assert sentence.startswith("sft: 25 rows with a batch_size of 1 and num_train_epochs 1 are 25 optimiser steps")


def test_a_source_that_is_held_out_is_not_trained_on(store: Any, rows: Path, tmp_path: Path, tiny_model: Any) -> None:
    test = tmp_path / "test.jsonl"
    test.write_text("".join(json.dumps({"prompt": f"{n} tests?", "completion": "!"}) + "\n" for n in range(40)))
    recipe = sft(rows) | {"model": {"name": str(tiny_model())}}
    sources = [{"path": str(rows)}, {"path": str(test), "held_out": True}]
    recipe["sft"] = {"data": {"sources": sources}, "training": {"batch_size": 4, "num_train_epochs": 1}}
    (sentence,) = look(store, recipe).warnings
    assert sentence.startswith("sft: 100 rows with a batch_size of 4 and num_train_epochs 1 are 25 optimiser steps")


def test_models_from_scratch_and_rows_that_were_not_all_read_are_not_judged(
    store: Any, rows: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(store, sft(rows)).warnings == []
    from alignment_core.checks.rows import answers_to

    monkeypatch.setattr("alignment_core.checks.rows.RENDERED", 50)
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    assert trained() == []


@pytest.mark.parametrize(("long", "share"), [(5, None), (8, "8 of the 108 rows (7%)")])
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_a_max_length_below_the_95th_percentile_is_warned_about(
    long: int, share: str | None, overlong: str, store: Any, rows: Path
) -> None:
    """Of 105 rows 5 are 4.8 %, of 108 rows 8 are 7.4 %."""
    with rows.open("a") as file:
        file.writelines(json.dumps({"prompt": f"{n}?", "completion": "!" * 100}) + "\n" for n in range(500, 500 + long))
    warnings = look(store, sft(rows, max_length=64, overlong=overlong)).warnings
    assert [f"sft/data: {share}" in sentence for sentence in warnings] == ([True] if share else [])
