"""The comparison with TRL's trainers, at the size of a toy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.real.curve_sides import METHODS, Side, Sizes, of_trl, ours, scored
from tests.real.page import save_trl, saved_trl, trl_table
from tests.real.trl_curves import figures_of

SIZES = Sizes(steps=3, max_length=160, held_out=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in the forms of GSM8K and HH, of different lengths."""
    folder = tmp_path_factory.mktemp("data")
    for split, first in (("train", 0), ("test", 50)):
        numbers = range(first, first + (20 if split == "train" else 8))
        solutions = [{"question": f"{n} + {n}?", "answer": f"It is {n * n}{n}. " * (1 + n % 3)} for n in numbers]
        pairs = [
            {
                "chosen": f"\n\nHuman: {n}{' and more' * (n % 4)}?\n\nAssistant: yes, {n * n}",
                "rejected": f"\n\nHuman: {n}{' and more' * (n % 4)}?\n\nAssistant: no{'!' * (1 + n % 5)}",
            }
            for n in numbers
        ]
        for name, rows in (("gsm8k", solutions), ("hh-rlhf-harmless", pairs)):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_curves_are_trls(name: str, machines: Any, tiny_model: Any, data: Path, tmp_path: Path) -> None:
    model = scored(tiny_model(), tmp_path / "start") if name == "reward-model" else tiny_model()
    own = ours(name, model, tmp_path / "ours", data, SIZES, machines(1))
    trl = of_trl(name, model, Path(own.rows), SIZES)
    assert own.losses == pytest.approx(trl.losses, abs=1e-5)
    assert own.held_out.keys() == trl.held_out.keys()
    for metric, (before, after) in own.held_out.items():
        if metric != "accuracy" or name == "reward-model":  # of the others, all pairs are ties at first
            assert before == pytest.approx(trl.held_out[metric][0], abs=1e-5), metric
        assert after == pytest.approx(trl.held_out[metric][1], abs=1e-5), metric


def test_the_table_has_a_row_for_each_side() -> None:
    own = Side([1.5, 1.25], {"loss": [1.4, 1.3], "accuracy": [0.5, 0.625]}, 12.0)
    trl = Side([1.5, 1.2502], {"loss": [1.4, 1.3], "accuracy": [0.5, 0.75]}, 30.0)
    line = figures_of("dpo", Path("model"), 8, (own, 3_210_000_000), (trl, 6_540_000_000))
    assert line["difference"] == pytest.approx(2e-4)
    assert list(trl_table([line]))[2:] == [
        "| dpo | ours | 1.5000 → 1.2500 | 2.0e-04 | 1.4000 → 1.3000 | 0.5000 → 0.6250 [0.306, 0.863] | — | 12 | 3.2 |",
        "| dpo | TRL | 1.5000 → 1.2502 | — | 1.4000 → 1.3000 | 0.5000 → 0.7500 [0.409, 0.929] | — | 30 | 6.5 |",
    ]


def test_figures_replace_those_of_the_same_method_alone(tmp_path: Path) -> None:
    for line in ({"method": "sft", "difference": 1.0}, {"method": "dpo"}, {"method": "sft", "difference": 2.0}):
        save_trl(tmp_path / "results", [line])
    assert saved_trl(tmp_path / "results") == {"sft": {"method": "sft", "difference": 2.0}, "dpo": {"method": "dpo"}}
