"""The table and the page of ``python -m tests.real``, from an outcome written by hand."""

from __future__ import annotations

from importlib import import_module
from typing import Any

real = import_module("tests.real.__main__")


def stage(label: str, key: str, seconds: float) -> dict[str, Any]:
    return {"label": label, "key": key, "state": "cached", "cost": {"seconds": seconds}}


OUTCOME = {
    "metrics": {
        "policies": {
            "start": {"accuracy": 0.1, "accuracy.low": 0.05, "accuracy.high": 0.2, "length": 30.0},
            "grpo": {
                "accuracy": 0.75,
                "accuracy.low": 0.66,
                "accuracy.high": 0.82,
                "length": 12.25,
                "kl": 20.04,
            },
            "ppo": {"accuracy": 0.5, "accuracy.low": 0.4, "accuracy.high": 0.6},
        }
    },
    "stages": [
        stage("start/evaluation", "a", 500.0),
        stage("grpo/rl", "b", 600.0),
        stage("grpo/evaluation/generate", "c", 30.0),
        stage("grpo/evaluation/generate", "c", 30.0),
        stage("grpo-strict/rl", "d", 900.0),
    ],
    "failed": {"rloo/rl": "the loss is not finite\nat step 3"},
}
SAMPLES = [{"prompt": "Describe ice.", "label": "[]", "start": "Ice is\n\ncold.", "grpo": "COLD", "ppo": "Cold!"}]
RUN = real.Run(2, OUTCOME, SAMPLES, 5_600_000_000)


def test_the_table_has_a_row_for_each_method_and_one_for_each_failure() -> None:
    assert list(real.table([RUN]))[2:] == [
        "| 2 | grpo | 0.100 [0.050, 0.200] | 0.750 [0.660, 0.820] | 20.0 | 12.2 | 10.5 |",
        "| 2 | ppo | 0.100 [0.050, 0.200] | 0.500 [0.400, 0.600] | — | — | 0.0 |",
        "| 2 | rloo/rl | failed | the loss is not finite | | | |",
    ]


def test_the_page_shows_answers_before_and_after_uncut() -> None:
    page = real.page([RUN])
    assert "had 5.6 GB of memory" in page
    assert "**Describe ice.**\n\n```text\nIce is\n\ncold.\n```\n\n```text\nCOLD\n```" in page
    assert "```text\nCold!\n```" in page
