"""Rows with tools and calls of them, and conversations of which only the last turn is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data.build import BuiltDataset
from alignment_core.errors import DataError, UserError

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }},{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({{ c.function.arguments.x }})]{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "square", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "square", "arguments": {"x": 3}}}
CHAT = [
    {"role": "user", "content": "3 squared?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "9"},
    {"role": "assistant", "content": "nine"},
]


def targets(data: BuiltDataset, tokenizer: Any) -> list[str]:
    rows = zip(data.train["input_ids"].to_pylist(), data.train["loss_mask"].to_pylist(), strict=True)
    return [tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on]) for ids, mask in rows]


@pytest.mark.parametrize("form", ["list", "json", "parquet"])
def test_the_template_shows_tools_and_calls_and_calls_are_targets(
    built: Build, jsonl: Write, tokenizer: Any, tmp_path: Path, form: str
) -> None:
    row = {"messages": CHAT, "tools": json.dumps(TOOLS) if form == "json" else TOOLS}
    path = jsonl([row])
    if form == "parquet":  # gives every message every field
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    data = built(path, "demonstrations", chat_template=TEMPLATE)
    assert data.train["text"][0].as_py() == (
        "<tools>square,<user>3 squared?<assistant>[square(3)]<eos><tool>9<assistant>nine<eos>"
    )
    assert targets(data, tokenizer) == ["[square(3)]<eos>nine<eos>"]


def test_only_the_last_turn_is_trained_if_configured(built: Build, jsonl: Write, tokenizer: Any) -> None:
    rows = [{"messages": CHAT, "tools": TOOLS}, {"prompt": "a", "completion": "b"}]
    data = built(jsonl(rows[:1]), "demonstrations", chat_template=TEMPLATE, assistant_turns="last")
    assert targets(data, tokenizer) == ["nine<eos>"]
    plain = built(jsonl(rows[1:]), "demonstrations", assistant_turns="last")
    assert targets(plain, tokenizer) == ["b<eos>"]


def test_pairs_have_tools_too(built: Build, jsonl: Write) -> None:
    answers = {"chosen": CHAT[1:2], "rejected": [{"role": "assistant", "content": "ten"}]}
    data = built(jsonl([{"prompt": CHAT[:1], **answers, "tools": TOOLS}]), "preferences", chat_template=TEMPLATE)
    row = data.train.to_pylist()[0]
    assert row["prompt"] == "<tools>square,<user>3 squared?<assistant>"
    assert (row["chosen"], row["rejected"]) == ("[square(3)]", "ten")


def test_tools_that_a_template_does_not_show_are_refused(built: Build, jsonl: Write, plain_tokenizer: Any) -> None:
    rows = jsonl([{"prompt": "a", "completion": "b", "tools": TOOLS}])
    with pytest.raises(UserError, match="the rows have `tools`, which the chat template does not show"):
        built(rows, "demonstrations")
    with pytest.raises(UserError, match="neither the tokenizer nor the data set has a chat template"):
        built(rows, "demonstrations", tokenizer=plain_tokenizer)


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ("[", r"`tools` is not the JSON text of a list: '\['"),
        ({"name": "a"}, "`tools` is an object; a list of schemas of functions is needed"),
        (["square"], "`tools` is a list of 1; a list of schemas"),
    ],
)
def test_invalid_tools_are_named_with_their_row(built: Build, jsonl: Write, tools: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl:1: {sentence}"):
        built(jsonl([{"prompt": "a", "completion": "b", "tools": tools}]), "demonstrations", chat_template=TEMPLATE)


def test_a_message_without_words_and_calls_is_still_malformed(built: Build, jsonl: Write) -> None:
    rows = [{"messages": [CHAT[0], {"role": "assistant", "content": None}]}]
    with pytest.raises(DataError, match=r"`messages\[1\].content` is null"):
        built(jsonl(rows), "demonstrations", chat_template=TEMPLATE)
