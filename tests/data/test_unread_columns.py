"""Columns of which other libraries make a part of the prompt: read, or named in a warning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.conftest import Build, Write

PROMPT = {"prompt": "2+2?"}
ROWS: dict[str, dict[str, Any]] = {
    "demonstrations": {**PROMPT, "completion": "4"},
    "preferences": {**PROMPT, "chosen": "4", "rejected": "5"},
    "unpaired": {**PROMPT, "completion": "4", "label": True},
    "stepwise": {**PROMPT, "completions": ["2+2", "4"], "labels": [True, True]},
    "prompts": PROMPT,
}
COLUMNS: dict[str, Any] = {
    "system": "be brief",
    "input": "in decimal",
    "history": [["1+1?", "2"]],
    "functions": [{"name": "f"}],
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_column_that_no_kind_of_rows_reads_is_named(built: Build, jsonl: Write, kind: str, column: str) -> None:
    data = built(jsonl([{**ROWS[kind], column: COLUMNS[column], "id": 7}, {**ROWS[kind], column: ""}]), kind)
    assert data.statistics["unread"] == {f"rows have `{column}`, which nothing reads": 1}


def test_columns_that_are_read_are_not_named(built: Build, jsonl: Write) -> None:
    """ShareGPT's ``system``, a column that the recipe names, and one that is kept."""
    chat = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    path = jsonl([{"conversations": chat, "system": "be brief"}])
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert "unread" not in built(path, "demonstrations", chat_template=template).statistics
    path = jsonl([{"instruction": "2+2?", "input": "4"}])
    columns = {"prompt": "instruction", "completion": "input"}
    assert "unread" not in built({"path": str(path), "columns": columns}, "demonstrations").statistics
    path = jsonl([{"prompt": "2+2?", "system": "be brief"}])
    assert "unread" not in built({"path": str(path), "keep_columns": ["system"]}, "prompts").statistics
