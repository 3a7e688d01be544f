"""Arguments of calls and schemas of tools reach the template as the row has them, explicit nulls included.

The right texts are ``json.dumps`` of the arguments and schemas as they were written down, as ``tojson`` of `transformers`' chat
templates writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data.build import BuiltDataset
from alignment_core.errors import DataError
from alignment_core.init import rows as starting_rows

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ (c.function or c).arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ARGUMENTS = {"city": "Oslo", "unit": None, "days": [None, {"from": None}]}
SCHEMA = {"name": "weather", "parameters": {"properties": {"unit": {"enum": ["C", None], "default": None}}}}


def row(arguments: Any, tools: Any = (SCHEMA,), call: Any = None) -> dict[str, Any]:
    call = call or {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "rain?", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        ],
        "tools": tools if isinstance(tools, str) else list(tools),
    }


def text(arguments: Any, tools: Any = (SCHEMA,)) -> str:
    return f"{json.dumps(list(tools))}<user>rain?<assistant>{json.dumps(arguments)}<eos>"


@pytest.mark.parametrize(
    "values",
    [
        row(ARGUMENTS),
        row(json.dumps(ARGUMENTS)),
        row(json.dumps(ARGUMENTS), tools=json.dumps([SCHEMA])),
        row(None, call={"name": "weather", "arguments": json.dumps(ARGUMENTS)}),
    ],
    ids=["objects", "text of arguments", "text of schemas", "a call without function"],
)
def test_nulls_of_json_lines_are_trained_and_json_text_is_not_escaped_again(
    built: Build, jsonl: Write, values: Any
) -> None:
    data = built(jsonl([values]), "demonstrations", chat_template=TEMPLATE)
    assert data.train["text"].to_pylist() == [text(ARGUMENTS)]


def test_nulls_with_which_parquet_pads_are_no_arguments_but_those_of_json_text_are(
    built: Build, tmp_path: Path
) -> None:
    """Two calls with different arguments: Parquet gives each the fields of both."""
    rows = [row({"city": "Oslo"}, tools=json.dumps([SCHEMA])), row({"unit": "C"}, tools=json.dumps([SCHEMA]))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "padded.parquet")
    assert pq.read_table(tmp_path / "padded.parquet").to_pylist()[0]["messages"][1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Oslo", "unit": None},
    }
    data = built(tmp_path / "padded.parquet", "demonstrations", chat_template=TEMPLATE, shuffle=False)
    assert data.train["text"].to_pylist() == [text({"city": "Oslo"}), text({"unit": "C"})]
    pq.write_table(pa.Table.from_pylist([row(json.dumps(ARGUMENTS), json.dumps([SCHEMA]))]), tmp_path / "text.parquet")
    data = built(tmp_path / "text.parquet", "demonstrations", chat_template=TEMPLATE)
    assert data.train["text"].to_pylist() == [text(ARGUMENTS)]


@pytest.mark.parametrize("arguments", ["city=Oslo", '["Oslo"]', '{"city": '])
def test_arguments_that_are_no_object_are_named(built: Build, jsonl: Write, arguments: str) -> None:
    where = r"train\.jsonl:1: `messages\[1\]\.tool_calls\[0\]\.function\.arguments` is the text .*, not the JSON text"
    with pytest.raises(DataError, match=where):
        built(jsonl([row(arguments)]), "demonstrations", chat_template=TEMPLATE)


def test_a_call_without_arguments_has_none(built: Build, jsonl: Write) -> None:
    data = built(jsonl([row("")]), "demonstrations", chat_template=TEMPLATE)
    assert data.train["text"].to_pylist() == [text({})]


def test_tool_arguments_of_a_parquet_file_are_not_padded_by_init(tmp_path: Path) -> None:
    rows = [row({"city": "Oslo"}), row({"unit": "C"})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    rows_found = starting_rows.find(str(tmp_path / "rows.parquet")).first
    calls = [row_found["messages"][1]["tool_calls"][0]["function"]["arguments"] for row_found in rows_found]
    assert calls == [{"city": "Oslo"}, {"unit": "C"}]
