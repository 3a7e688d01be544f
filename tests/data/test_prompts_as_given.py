"""Prompts keep their form before the chat template, and the columns in `keep_columns`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignment_core.errors import DataError, UserError
from alignment_core.recipes.sections.data import DataSource
from tests.data.conftest import Build, Write
from tests.data.test_data_build import column

USER: dict[str, Any] = {"role": "user", "content": "héllo"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "be brief"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "hi"}
PROBLEM: dict[str, Any] = {"prompt": "2+2=", "solution": "4", "difficulty": {"level": 1, "of": [1, None]}}


def as_given(data: Any) -> list[Any]:
    return [messages and json.loads(messages) for messages in column(data, "messages")]


def test_messages_are_kept_and_so_is_a_text_that_the_template_wraps(built: Build, jsonl: Write) -> None:
    prompts = built({"path": str(jsonl([{"prompt": [SYSTEM, USER]}])), "shuffle": False}, "prompts")
    assert as_given(prompts) == [[SYSTEM, USER]]
    assert "héllo" in column(prompts, "messages")[0]
    conversation = built(jsonl([{"messages": [USER, ANSWER]}]), "prompts")
    assert as_given(conversation) == [[USER]], "without the answer"
    assert as_given(built(jsonl([{"prompt": "2+2="}]), "prompts")) == ["2+2="]
    pair = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    assert as_given(built(jsonl([pair]), "prompts")) == [[{"role": "user", "content": "a"}]]


def test_a_prompt_that_no_template_changed_or_that_was_cut_is_its_text_alone(
    built: Build, jsonl: Write, plain_tokenizer: Any
) -> None:
    assert as_given(built(jsonl([{"prompt": "2+2="}]), "prompts", plain_tokenizer)) == [None]
    long = {"prompt": [{**USER, "content": "a" * 50}]}
    cut = built({"path": str(jsonl([long])), "max_prompt_length": 20, "overlong": "truncate"}, "prompts")
    assert as_given(cut) == [None]


def test_kept_columns_are_unchanged(built: Build, jsonl: Write) -> None:
    path = str(jsonl([PROBLEM, {**PROBLEM, "solution": None}]))
    kept = built({"path": path, "keep_columns": ["solution", "difficulty"], "shuffle": False}, "prompts")
    assert [json.loads(columns) for columns in column(kept, "columns")] == [
        {"solution": "4", "difficulty": {"level": 1, "of": [1, None]}},
        {"solution": None, "difficulty": {"level": 1, "of": [1, None]}},
    ]
    assert column(built({"path": path}, "prompts"), "columns") == [None, None]


def test_rows_that_differ_in_a_kept_column_are_no_copies_of_each_other(built: Build, jsonl: Write) -> None:
    rows = [{"prompt": prompt, "solution": number} for prompt in "abcdefgh" for number in range(2)]

    def copies(**fields: Any) -> Any:
        return built({"path": str(jsonl(rows)), "test_rows": 4, **fields}, "prompts").statistics["dropped"]

    assert copies(keep_columns=["solution"]) == {}
    assert copies() == {"duplicate_of_test": 4}


def test_a_row_without_the_column_or_with_a_value_that_json_cannot_represent_is_malformed(
    built: Build, jsonl: Write
) -> None:
    path = str(jsonl([PROBLEM, {"prompt": "1+1="}]))
    with pytest.raises(DataError, match=r"train\.jsonl:2: there is no `solution`; the row has prompt"):
        built({"path": path, "keep_columns": ["solution"]}, "prompts")
    half = str(jsonl(['{"prompt": "a", "solution": "\\ud83d"}\n']))
    with pytest.raises(
        DataError, match=r"train\.jsonl:1: `solution` is in `keep_columns`, but contains a value that JSON cannot"
    ):
        built({"path": half, "keep_columns": ["solution"]}, "prompts")


def test_other_rows_keep_no_columns(built: Build, jsonl: Write) -> None:
    path = str(jsonl([{"prompt": "a", "completion": "b", "solution": "c"}]))
    with pytest.raises(UserError, match=r"train\.jsonl: keep_columns: demonstrations cannot keep further columns"):
        built({"path": path, "keep_columns": ["solution"]}, "demonstrations")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["solution", "label"], "'label' already means something else to reward functions"),
        (["a", "a"], "named twice"),
    ],
)
def test_names_that_are_taken_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DataSource(path="rows.jsonl", keep_columns=names)
