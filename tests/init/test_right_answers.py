"""Labels of the rows: right answers, which a verifier compares with, or ratings, which it must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import UserError
from tests.init.conftest import Draft, problems
from tests.init.rows_of_kinds import ROWS, jsonl


def test_worked_solutions_are_imitated_and_verified(draft: Draft, tmp_path: Path) -> None:
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS["worked solutions"][2]))
    assert result.recipe["evaluation"]["verifier"] == "math"
    assert result.recipe["evaluation"]["prompts"]["sources"][0]["columns"] == {"prompt": "question", "label": "answer"}


def test_answers_that_demonstrations_show_are_right_answers(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"{n} + 1", "completion": f"It is {n + 1}.", "label": n + 1} for n in range(40)]
    result = draft(jsonl(tmp_path / "rows.jsonl", content), method="sft")
    assert result.recipe["evaluation"]["verifier"] == "math"


@pytest.mark.parametrize(
    "labels", [(1, -1), (0, 1), (1, 2, 3, 4, 5), ("good", "bad"), ("up", "down")], ids=lambda labels: str(labels[:2])
)
def test_ratings_are_no_right_answers(labels: tuple[Any, ...], draft: Draft, store: Store, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}", "label": labels[n % len(labels)]} for n in range(40)]
    result = draft(jsonl(tmp_path / "rows.jsonl", content), method="sft")
    assert "verifier" not in result.recipe.get("evaluation", {})
    assert ("label", "", labels[0]) in result.columns
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_thumbs_that_are_all_up_are_demonstrations(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}", "is_correct": True} for n in range(40)]
    assert draft(jsonl(tmp_path / "rows.jsonl", content)).method == "sft"


@pytest.mark.parametrize("method", ["rl", "conditional-sft", "rejection-sampling"])
def test_a_method_that_needs_right_answers_is_refused_without_a_column_for_them(
    method: str, draft: Draft, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="its answers cannot be verified: no column holds a right answer"):
        draft(jsonl(tmp_path / "rows.jsonl", ROWS["prompts alone"][2]), method=method)


def test_rows_without_the_answer_that_a_verifier_needs_are_counted(draft: Draft, tmp_path: Path) -> None:
    content = [{"question": f"{n} + 1", "answer": None if n == 31 else n + 1} for n in range(40)]
    result = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert result.method == "rl"
    assert result.problems == [
        "1 of the first 40 rows that can be read have no answer in `answer` that the verifier math understands, the first is "
        "number 32: a run would end there; correct or remove them"
    ]
