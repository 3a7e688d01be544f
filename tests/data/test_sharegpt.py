"""Conversations in ShareGPT's form give the rows that the same words give as messages with `role` and `content`."""

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
from alignment_core.init.guess import guess_columns

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "2+2?"},
    {"from": "gpt", "value": "4"},
    {"from": "user", "value": "3+3?"},
    {"from": "assistant", "value": "6"},
]
ROLES = ["system", "user", "assistant", "user", "assistant"]
MESSAGES = [{"role": role, "content": turn["value"]} for role, turn in zip(ROLES, SHAREGPT, strict=True)]


def table(data: BuiltDataset) -> list[dict[str, Any]]:
    return [{**row, "source": None} for row in data.train.to_pylist()]


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("demonstrations", {"messages": MESSAGES}, {"conversations": SHAREGPT}),
        ("demonstrations", {"messages": MESSAGES}, {"messages": SHAREGPT}),
        ("demonstrations", {"messages": MESSAGES}, {"conversations": SHAREGPT[1:], "system": "Be brief."}),
        ("demonstrations", {"messages": MESSAGES[1:]}, {"conversations": SHAREGPT[1:], "system": ""}),
        ("prompts", {"messages": MESSAGES, "label": "6"}, {"conversations": SHAREGPT, "label": "6"}),
        ("prompts", {"prompt": MESSAGES[:2]}, {"prompt": SHAREGPT[:2]}),
        (
            "preferences",
            {"prompt": MESSAGES[:4], "chosen": MESSAGES[4:], "rejected": [{"role": "assistant", "content": "7"}]},
            {"prompt": SHAREGPT[:4], "chosen": SHAREGPT[4], "rejected": {"from": "gpt", "value": "7"}},
        ),
        (
            "preferences",
            {"prompt": MESSAGES[:4], "chosen": MESSAGES[4:], "rejected": [{"role": "assistant", "content": "7"}]},
            {"conversations": SHAREGPT[:4], "chosen": SHAREGPT[4], "rejected": {"from": "gpt", "value": "7"}},
        ),
        (  # the prompt of a pair
            "demonstrations",
            {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]},
            {"conversations": SHAREGPT[:4], "chosen": SHAREGPT[4], "rejected": {"from": "gpt", "value": "7"}},
        ),
        (  # columns with their own names take precedence
            "demonstrations",
            {"prompt": "2+2?", "completion": "4"},
            {"prompt": "2+2?", "completion": "4", "conversations": [{"from": "human", "value": "5+5?"}]},
        ),
        (
            "unpaired",
            {"prompt": MESSAGES[:4], "completion": MESSAGES[4:], "label": True},
            {"prompt": SHAREGPT[:4], "completion": SHAREGPT[4:], "label": True},
        ),
        (
            "stepwise",
            {"prompt": MESSAGES[:2], "completions": ["2+2", "=4"], "labels": [True, True]},
            {"prompt": SHAREGPT[:2], "completions": ["2+2", "=4"], "labels": [True, True]},
        ),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_of_every_kind_are_those_of_messages(
    built: Build, jsonl: Write, tmp_path: Path, kind: str, ours: Any, theirs: Any, form: str
) -> None:
    path = jsonl([theirs], name="theirs.jsonl")
    if form == "parquet":
        path = tmp_path / "theirs.parquet"
        pq.write_table(pa.Table.from_pylist([theirs]), path)
    assert table(built(path, kind)) == table(built(jsonl([ours]), kind))


@pytest.mark.parametrize("column", ["conversations", "dialogue"])
def test_pairs_after_mapped_messages_are_read_as_by_llama_factory(built: Build, jsonl: Write, column: str) -> None:
    """Its README maps `messages`, `chosen` and `rejected` of such rows."""
    pair = {"chosen": SHAREGPT[4], "rejected": {"from": "gpt", "value": "7"}}
    columns = {"messages": column, "chosen": "chosen", "rejected": "rejected"}
    source = {"path": str(jsonl([{column: SHAREGPT[:4], **pair}], name="mapped.jsonl")), "columns": columns}
    ours = {"prompt": MESSAGES[:4], "chosen": MESSAGES[4:], "rejected": [{"role": "assistant", "content": "7"}]}
    assert table(built({"sources": [source]}, "preferences")) == table(built(jsonl([ours]), "preferences"))


TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_calls_and_observations_are_tool_calls_and_their_results(built: Build, jsonl: Write) -> None:
    call = {"name": "weather", "arguments": {"city": "Oslo", "unit": None}}
    conversation = [
        {"from": "human", "value": "rain?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "yes"},
        {"from": "gpt", "value": "It rains."},
    ]
    row = {"conversations": conversation, "tools": '[{"name": "weather"}]'}
    data = built(jsonl([row]), "demonstrations", chat_template=TEMPLATE)
    assert data.train["text"].to_pylist() == [
        '[{"name": "weather"}]<user>rain?<assistant>[weather {"city": "Oslo", "unit": null}]<tool>yes'
        "<assistant>It rains.<eos>"
    ]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"from": "narrator", "value": "a"}, r"`conversations\[1\].from` is 'narrator'; known are human, user, gpt"),
        ({"from": "gpt", "value": None}, r"`conversations\[1\].content` is null; text is needed"),
        ({"from": "function_call", "value": "weather()"}, r"`conversations\[1\].value` is not the JSON text of a call"),
    ],
)
def test_an_invalid_message_is_named(built: Build, jsonl: Write, message: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl:1: {sentence}"):
        built(jsonl([{"conversations": [SHAREGPT[1], message]}]), "demonstrations")


def test_init_reads_sharegpt_rows(jsonl: Write) -> None:
    path = jsonl([{"id": str(number), "conversations": SHAREGPT} for number in range(5)])
    profile = starting_rows.find(str(path))
    read = guess_columns(profile.first, "demonstrations", (), {})
    assert read is not None
    assert (read.format, read.columns) == ("messages", {"messages": "conversations"})
