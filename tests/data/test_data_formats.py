"""Rows to examples: each format, each way to be malformed, each with its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data.formats import (
    PreferenceExample,
    PromptExample,
    SftExample,
    check_columns,
    check_format,
    detect,
    parse,
)
from alignment_core.errors import UserError

USER, HELLO, BYE = (
    {"role": role, "content": c} for role, c in (("user", "hi"), ("assistant", "hello"), ("assistant", "bye"))
)
HH = "\n\nHuman: hi\n\nAssistant: "
HALF = "\ud83d"  # half of a surrogate pair: JSON can write it, UTF-8 cannot hold it


@pytest.mark.parametrize(
    ("values", "format", "purpose", "example"),
    [
        ({"prompt": "a", "completion": "b"}, "prompt_completion", "sft", SftExample("a", "b")),
        ({"prompt": "hi", "completion": [HELLO]}, "prompt_completion", "sft", SftExample([USER], [HELLO])),
        ({"messages": [USER, HELLO]}, "messages", "sft", SftExample([], [USER, HELLO])),
        ({"text": "a"}, "text", "sft", SftExample(None, "a")),
        ({"chosen": HH + "b", "rejected": HH + "c"}, "hh", "sft", SftExample([USER], [{**HELLO, "content": "b"}])),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2},
            "preference",
            "preference",
            PreferenceExample("a", "b", "c", 2.0),
        ),
        (
            {"chosen": [USER, HELLO], "rejected": [USER, BYE]},
            "preference",
            "preference",
            PreferenceExample([USER], [HELLO], [BYE]),
        ),
        (
            {"prompt": "hi", "chosen": [USER, HELLO], "rejected": [USER, BYE]},
            "preference",
            "preference",
            PreferenceExample([USER], [HELLO], [BYE]),
        ),
        (
            {"chosen": HH + "hello", "rejected": HH + " bye\n"},
            "hh",
            "preference",
            PreferenceExample([USER], [HELLO], [BYE]),
        ),
        ({"prompt": "a", "label": 72}, "prompts", "prompts", PromptExample("a", "72")),
        ({"prompt": [USER], "label": None}, "prompts", "prompts", PromptExample([USER])),
        ({"messages": [USER, HELLO]}, "messages", "prompts", PromptExample([USER])),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", "prompts", PromptExample("a")),
    ],
)
def test_row_is_read(values: dict[str, Any], format: str, purpose: Any, example: Any) -> None:
    assert parse(values, format, {}, purpose) == parse(values, detect(values, "auto", {}, purpose), {}, purpose)
    assert parse(values, format, {}, purpose) == example


def test_hh_neighbours_of_one_speaker_become_one_turn() -> None:
    pair = parse({"chosen": HH + "a\n\nAssistant: b", "rejected": HH + "c"}, "hh", {}, "preference")
    assert pair == PreferenceExample([USER], [{**HELLO, "content": "a\n\nb"}], [{**HELLO, "content": "c"}])


def test_columns_rename_columns_and_reach_into_them() -> None:
    values = {"turns": ["one", "two"], "meta": {"answer": "three"}}
    assert parse(values, "prompts", {"prompt": "turns.1", "label": "meta.answer"}, "prompts") == PromptExample(
        "two", "three"
    )


def test_fields_of_a_message_that_are_null_are_absent_as_parquet_cannot_leave_them_out() -> None:
    (message,) = parse({"messages": [{**USER, "name": None}, HELLO]}, "messages", {}, "prompts").prompt  # type: ignore[union-attr,misc]
    assert message == USER


@pytest.mark.parametrize(
    ("values", "format", "purpose", "sentence"),
    [
        ({"prompt": None, "completion": "b"}, "prompt_completion", "sft", "`prompt` is null; text or a list"),
        ({"prompt": 3, "completion": "b"}, "prompt_completion", "sft", "`prompt` is the number 3; text or a list"),
        ({"prompt": "", "completion": "b"}, "prompt_completion", "sft", "`prompt` is empty"),
        ({"prompt": "a"}, "prompt_completion", "sft", "there is no `completion`; the row has prompt"),
        ({"prompt": "a", "completion": {"x": 1}}, "prompt_completion", "sft", "`completion` is an object"),
        ({"prompt": "a", "completion": [USER]}, "prompt_completion", "sft", "has no assistant message"),
        ({"prompt": ["a"], "completion": "b"}, "prompt_completion", "sft", "`prompt[0]` is the text 'a'; an object"),
        ({"text": ["a"]}, "text", "sft", "`text` is a list of 1; text is needed"),
        ({"text": HALF}, "text", "sft", r"`text` is not valid Unicode: '\ud83d' at character 1"),
        ({"messages": "hi"}, "messages", "sft", "`messages` is the text 'hi'; a list of messages is needed"),
        ({"messages": []}, "messages", "sft", "`messages` is an empty list"),
        ({"messages": [None]}, "messages", "sft", "`messages[0]` is null; an object with `role` and `content`"),
        ({"messages": [{"role": "user"}]}, "messages", "sft", "`messages[0]` has no `content`; it has role"),
        ({"messages": [{**USER, "content": None}]}, "messages", "sft", "`messages[0].content` is null; text is needed"),
        ({"messages": [{**USER, "content": [1]}]}, "messages", "sft", "`messages[0].content` is a list of 1"),
        ({"messages": [{**USER, "role": "human"}]}, "messages", "sft", "`messages[0].role` is 'human'; roles are"),
        ({"messages": [USER]}, "messages", "sft", "nothing to train on"),
        ({"messages": [HELLO]}, "messages", "sft", "begins with an assistant message"),
        ({"messages": [HELLO]}, "messages", "prompts", "only assistant messages"),
        ({"chosen": "a", "rejected": "b"}, "preference", "preference", "there is no `prompt`"),
        ({"chosen": [USER, HELLO], "rejected": [HELLO]}, "preference", "preference", "`rejected` must hold a prompt"),
        ({"chosen": [USER, HELLO], "rejected": [USER, USER]}, "preference", "preference", "end with an assistant"),
        (
            {"chosen": [USER, HELLO], "rejected": [USER, BYE, USER, BYE]},
            "preference",
            "preference",
            "differ before their last message",
        ),
        (
            {"prompt": "x", "chosen": [USER, HELLO], "rejected": "b"},
            "preference",
            "preference",
            "`chosen` must be one assistant message after the prompt, this is user, assistant",
        ),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": "much"},
            "preference",
            "preference",
            "`margin` is the text 'much'; a number is needed",
        ),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": float("nan")},
            "preference",
            "preference",
            "`margin` is nan; a finite number is needed",
        ),
        ({"chosen": "hi", "rejected": HH}, "hh", "preference", r"`chosen` does not begin with '\n\nHuman:': 'hi'"),
        ({"prompt": "x", "label": True}, "prompts", "prompts", "`label` is true; text is needed"),
        ({"prompt": "x", "label": ["a"]}, "prompts", "prompts", "`label` is a list of 1; text is needed"),
    ],
)
def test_malformed_row_gets_its_sentence(values: dict[str, Any], format: str, purpose: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the sentence is compared below, without escapes)
        parse(values, format, {}, purpose)
    assert sentence in str(caught.value)


def test_unknown_columns_are_answered_with_what_was_looked_for_and_found() -> None:
    with pytest.raises(UserError) as caught:
        detect({"question": "a", "answer": "b"}, "auto", {}, "sft")
    assert "looked for `messages`, or `prompt` and `completion`, or `text`" in str(caught.value)
    assert "the first row has question, answer" in str(caught.value)


def test_key_that_names_no_column_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="column 'qestion', but the first row has question; did you mean 'question'"):
        detect({"question": "a"}, "auto", {"prompt": "qestion"}, "prompts")


def test_unknown_role_in_columns_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no role 'promt'; did you mean 'prompt'"):
        check_columns({"promt": "question"})


def test_format_that_cannot_serve_the_purpose_is_refused() -> None:
    with pytest.raises(UserError, match="'text' cannot give preference pairs; choose one of preference, hh"):
        check_format("text", "preference")
