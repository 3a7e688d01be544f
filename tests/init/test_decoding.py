"""How the evaluations that `align init` writes sample: stated in the recipe, greedy where answers are scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.init.conftest import Draft
from tests.init.rows_of_kinds import jsonl

Write = Callable[..., tuple[dict[str, Any], str]]

VERIFIED = [{"question": f"{n} + 1 = ?", "answer": f"One more than {n}.\n#### {n + 1}"} for n in range(60)]
TEXTS = [{"prompt": f"say {n}", "completion": f"well, {n} it is"} for n in range(60)]
PAIRS = [{"prompt": f"say {n}", "chosen": f"well, {n} it is", "rejected": "no"} for n in range(60)]


@pytest.fixture
def write(draft: Draft, tmp_path: Path) -> Write:
    """The recipe of these rows, and its text."""

    def of_rows(rows: list[dict[str, Any]], method: str) -> tuple[dict[str, Any], str]:
        text = draft(jsonl(tmp_path / "rows.jsonl", rows), method=method).text
        return yaml.safe_load(text), text

    return of_rows


@pytest.mark.parametrize("method", ["sft", "grpo", "iterative-dpo", "rejection-sampling"])
def test_answers_that_a_verifier_scores_are_greedy(method: str, write: Write) -> None:
    content, text = write(VERIFIED, method)
    assert content["evaluation"]["verifier"]
    assert content["evaluation"]["generation"]["temperature"] == 0
    assert "greedy: the likeliest answer" in text


@pytest.mark.parametrize(("rows", "method"), [(TEXTS, "sft"), (PAIRS, "dpo")])
def test_without_a_verifier_answers_are_sampled_at_temperature_1_for_the_kl(
    rows: list[dict[str, Any]], method: str, write: Write
) -> None:
    """The KL estimator needs samples of the policy at temperature 1."""
    content, text = write(rows, method)
    assert "verifier" not in content["evaluation"]
    assert content["evaluation"]["generation"]["temperature"] == 1
    assert "sampled, so that the KL to the start is measured" in text
