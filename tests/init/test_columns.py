"""Columns of the rows in a first recipe: which are used, and notes on unused and unreadable ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import UserError
from tests.init.conftest import Draft, problems
from tests.init.rows_of_kinds import ROWS, jsonl


def test_the_input_of_alpaca_is_part_of_every_prompt(draft: Draft, tmp_path: Path) -> None:
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS["Alpaca"][2]))
    template = "{prompt}\n\n{input}"
    assert result.recipe["sft"]["data"]["prompt_template"] == template
    assert result.recipe["evaluation"]["prompts"]["prompt_template"] == template
    assert ("input", "in the prompt", "") in result.columns


def test_an_additional_column_with_nulls_is_part_of_the_prompts_that_have_it(draft: Draft, tmp_path: Path) -> None:
    content = [{"instruction": f"do {n}", "input": "it" if n % 4 else None, "output": f"a {n}"} for n in range(40)]
    result = draft(jsonl(tmp_path / "r.jsonl", content))
    assert result.recipe["sft"]["data"]["prompt_template"] == "{prompt}\n\n{input}"
    assert not any("`input`" in warning for warning in result.warnings)


def test_a_second_likely_column_is_listed_as_not_used(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "reply": f"r {n}", "response": f"a {n}"} for n in range(30)]
    file = jsonl(tmp_path / "rows.jsonl", content)
    result = draft(file)
    assert result.recipe["sft"]["data"]["sources"][0]["columns"] == {"completion": "response"}
    assert ("reply", "", "r 0") in result.columns
    corrected = draft(file, columns={"completion": "reply"}).recipe["sft"]["data"]["sources"][0]
    assert corrected["columns"] == {"completion": "reply"}


def test_nested_columns_may_be_named(draft: Draft, store: Store, tmp_path: Path) -> None:
    content = [{"data": {"prompt": f"q {n}", "completion": f"a {n}"}} for n in range(40)]
    result = draft(
        jsonl(tmp_path / "rows.jsonl", content), columns={"prompt": "data.prompt", "completion": "data.completion"}
    )
    assert result.method == "sft"
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_a_column_that_is_named_is_used_or_refused(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"q {n}", "a": n} for n in range(40)])
    with pytest.raises(UserError, match="--column completion=a: generate does not read these rows with it"):
        draft(file, columns={"completion": "a"})


def test_columns_from_which_nothing_is_learned_are_named(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completions": [f"a {n}"], "labels": ["good"], "id": n} for n in range(40)]
    result = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert result.method == "generate"
    assert [column for column, role, _ in result.columns if not role] == ["completions", "labels", "id"]


def test_a_cell_that_cannot_be_read_is_named(draft: Draft, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "completion": f"a {n}" if n % 3 else None} for n in range(40)]
    with pytest.raises(UserError, match="row 1: `completion` is null"):
        draft(jsonl(tmp_path / "rows.jsonl", content), method="sft")
    result = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert ("completion", "", None) in result.columns


def test_message_fields_that_the_chat_template_does_not_show_are_reported(draft: Draft, tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "yes"}
    chats = [[{"role": "user", "content": f"{number}?"}, {**turn, "votes": 1}] for number in range(9)]
    result = draft(jsonl(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats]))
    assert "9 assistant messages have `votes`, which the chat template does not show" in result.warnings
    thoughts = [[chat[0], {**turn, "reasoning_content": "hm"}] for chat in chats]
    result = draft(jsonl(tmp_path / "rows.jsonl", [{"messages": chat} for chat in thoughts]))
    assert any("rows were not measured" in warning for warning in result.warnings)


def test_unreadable_rows_are_reported(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2])
    file.write_text("{no row\n" + file.read_text())
    (sentence,) = [warning for warning in draft(file).warnings if "cannot be read" in warning]
    assert sentence.startswith("1 of the first rows cannot be read: rows.jsonl:1 ")
