"""Rows to examples: each format, each way to be malformed, each with its sentence."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data import kinds
from alignment_core.data.fields import Fields
from alignment_core.data.formats import check_columns, check_format, detect
from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.data.kinds.texts import Text
from alignment_core.errors import UserError

USER, HELLO, BYE = (
    {"role": role, "content": c} for role, c in (("user", "hi"), ("assistant", "hello"), ("assistant", "bye"))
)
SYSTEM = {"role": "system", "content": "be brief"}
HH = "\n\nHuman: hi\n\nAssistant: "
HALF = "\ud83d"  # half of a surrogate pair: JSON can write it, UTF-8 cannot hold it


def parse(values: dict[str, Any], format: str, columns: dict[str, str], kind: str) -> Any:
    return kinds.load(kind).formats[format].parse(Fields(values, columns))


READ: dict[str, list[tuple[dict[str, Any], str, Any]]] = {
    "demonstrations": [
        ({"prompt": "a", "completion": "b"}, "prompt_completion", Demonstration("a", "b")),
        ({"prompt": "hi", "completion": [HELLO]}, "prompt_completion", Demonstration([USER], [HELLO])),
        ({"messages": [USER, HELLO]}, "messages", Demonstration([], [USER, HELLO])),
        ({"text": "a"}, "text", Text("a")),
        ({"chosen": HH + "b", "rejected": HH + "c"}, "hh", Demonstration([USER], [{**HELLO, "content": "b"}])),
    ],
    "preferences": [
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}, "preference", Preference("a", "b", "c", 2.0)),
        ({"chosen": [USER, HELLO], "rejected": [USER, BYE]}, "preference", Preference([USER], [HELLO], [BYE])),
        (
            {"prompt": "hi", "chosen": [USER, HELLO], "rejected": [USER, BYE]},
            "preference",
            Preference([USER], [HELLO], [BYE]),
        ),
        (
            {"prompt": "hi", "chosen": [SYSTEM, USER, HELLO], "rejected": [SYSTEM, USER, BYE]},
            "preference",
            Preference([SYSTEM, USER], [HELLO], [BYE]),
        ),
        (
            {"prompt": "hi", "chosen": [USER, BYE, USER, HELLO], "rejected": [USER, BYE, USER, BYE]},
            "preference",
            Preference([USER, BYE, USER], [HELLO], [BYE]),
        ),
        ({"chosen": HH + "hello", "rejected": HH + " bye\n"}, "hh", Preference([USER], [HELLO], [BYE])),
    ],
    "prompts": [
        ({"prompt": "a", "label": 72}, "prompts", Prompt("a", "72")),
        ({"prompt": [USER], "label": None}, "prompts", Prompt([USER])),
        ({"messages": [USER, HELLO]}, "messages", Prompt([USER])),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", Prompt("a")),
    ],
}
"""By kind of rows: a row, its format, and the result."""


@pytest.mark.parametrize(
    ("kind", "values", "format", "example"), [(kind, *case) for kind, cases in READ.items() for case in cases]
)
def test_row_is_read(values: dict[str, Any], format: str, kind: str, example: Any) -> None:
    detected = detect(values, "auto", {}, kinds.load(kind))
    assert parse(values, format, {}, kind) == parse(values, detected, {}, kind)
    assert parse(values, format, {}, kind) == example


def test_hh_neighbours_of_one_speaker_become_one_turn() -> None:
    pair = parse({"chosen": HH + "a\n\nAssistant: b", "rejected": HH + "c"}, "hh", {}, "preferences")
    assert pair == Preference([USER], [{**HELLO, "content": "a\n\nb"}], [{**HELLO, "content": "c"}])


def test_columns_rename_columns_and_select_values_inside_columns() -> None:
    values = {"turns": ["one", "two"], "meta": {"answer": "three"}}
    assert parse(values, "prompts", {"prompt": "turns.1", "label": "meta.answer"}, "prompts") == Prompt("two", "three")


def test_null_fields_of_a_message_in_parquet_are_absent() -> None:
    (message,) = parse({"messages": [{**USER, "name": None}, HELLO]}, "messages", {}, "prompts").prompt  # type: ignore[union-attr,misc,str-unpack]
    assert message == USER


MALFORMED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "demonstrations": [
        ({"prompt": None, "completion": "b"}, "prompt_completion", "`prompt` is null; text or a list"),
        ({"prompt": 3, "completion": "b"}, "prompt_completion", "`prompt` is the number 3; text or a list"),
        ({"prompt": "", "completion": "b"}, "prompt_completion", "`prompt` is empty"),
        ({"prompt": "a"}, "prompt_completion", "there is no `completion`; the row has prompt"),
        ({"prompt": "a", "completion": {"x": 1}}, "prompt_completion", "`completion` is an object"),
        ({"prompt": "a", "completion": [USER]}, "prompt_completion", "has no assistant message"),
        ({"prompt": ["a"], "completion": "b"}, "prompt_completion", "`prompt[0]` is the text 'a'; an object"),
        ({"text": ["a"]}, "text", "`text` is a list of 1; text is needed"),
        ({"text": HALF}, "text", r"`text` is not valid Unicode: '\ud83d' at character 1"),
        ({"messages": "hi"}, "messages", "`messages` is the text 'hi'; a list of messages is needed"),
        ({"messages": []}, "messages", "`messages` is an empty list"),
        ({"messages": [None]}, "messages", "`messages[0]` is null; an object with `role` and `content`"),
        ({"messages": [{"role": "user"}]}, "messages", "`messages[0]` has no `content`; it has role"),
        ({"messages": [{**USER, "content": None}]}, "messages", "`messages[0].content` is null; text is needed"),
        ({"messages": [{**USER, "content": [1]}]}, "messages", "`messages[0].content` is a list of 1"),
        ({"messages": [{**USER, "role": "human"}]}, "messages", "`messages[0].role` is 'human'; roles are"),
        ({"messages": [USER]}, "messages", "nothing to train on"),
        ({"messages": [HELLO]}, "messages", "begins with an assistant message"),
    ],
    "prompts": [
        ({"messages": [HELLO]}, "messages", "only assistant messages"),
        ({"prompt": "x", "label": True}, "prompts", "`label` is true; text is needed"),
        ({"prompt": "x", "label": ["a"]}, "prompts", "`label` is a list of 1; text is needed"),
    ],
    "preferences": [
        ({"chosen": "a", "rejected": "b"}, "preference", "there is no `prompt`"),
        ({"chosen": [USER, HELLO], "rejected": [HELLO]}, "preference", "`rejected` must hold a prompt"),
        ({"chosen": [USER, HELLO], "rejected": [USER, USER]}, "preference", "end with an assistant"),
        (
            {"chosen": [USER, HELLO], "rejected": [USER, BYE, USER, BYE]},
            "preference",
            "differ before their last message",
        ),
        (
            {"prompt": "x", "chosen": [USER, HELLO], "rejected": [SYSTEM, USER, BYE]},
            "preference",
            "differ before their last message",
        ),
        (
            {"prompt": "x", "chosen": [HELLO, USER, HELLO], "rejected": [HELLO, USER, BYE]},
            "preference",
            "`chosen` must be one assistant message after the prompt, not assistant, user, assistant",
        ),
        (
            {"prompt": "x", "chosen": [USER, HELLO], "rejected": "b"},
            "preference",
            "`chosen` must be one assistant message after the prompt, not user, assistant",
        ),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": "much"},
            "preference",
            "`margin` is the text 'much'; a number is needed",
        ),
        (
            {"prompt": "x", "chosen": "a", "rejected": "b", "margin": float("nan")},
            "preference",
            "`margin` is nan; a finite number is needed",
        ),
        ({"chosen": "hi", "rejected": HH}, "hh", r"`chosen` does not begin with '\n\nHuman:': 'hi'"),
    ],
}
"""By kind of rows: a row, the declared format, and its error."""


@pytest.mark.parametrize(
    ("kind", "values", "format", "sentence"), [(kind, *case) for kind, cases in MALFORMED.items() for case in cases]
)
def test_malformed_row_gets_its_sentence(values: dict[str, Any], format: str, kind: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the sentence is compared below, without escapes)
        parse(values, format, {}, kind)
    assert sentence in str(caught.value)


def test_error_for_unknown_columns_lists_the_columns_required_and_found() -> None:
    with pytest.raises(UserError) as caught:
        detect({"question": "a", "answer": "b"}, "auto", {}, kinds.load("demonstrations"))
    assert "looked for `messages`, or `prompt` and `completion`, or `text`" in str(caught.value)
    assert "the first row has question, answer" in str(caught.value)


def test_key_that_names_no_column_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="column 'qestion', but the first row has question; did you mean 'question'"):
        detect({"question": "a"}, "auto", {"prompt": "qestion"}, kinds.load("prompts"))


@pytest.mark.parametrize(
    ("kind", "values", "columns", "format"),
    [
        (
            "demonstrations",
            {"messages": [USER, HELLO], "problem": "a", "solution": "b"},
            {"prompt": "problem", "completion": "solution"},
            "prompt_completion",
        ),
        ("demonstrations", {"messages": [USER, HELLO], "problem": "a"}, {"text": "problem"}, "text"),
        ("demonstrations", {"prompt": "a", "completion": "b", "chat": [USER, HELLO]}, {"messages": "chat"}, "messages"),
        ("prompts", {"prompt": "x", "chat": [USER]}, {"messages": "chat"}, "messages"),
        ("prompts", {"messages": [USER, HELLO], "q": "x", "a": "y"}, {"prompt": "q", "label": "a"}, "prompts"),
        ("prompts", {"prompt": "x", "good": "a", "bad": "b"}, {"chosen": "good", "rejected": "bad"}, "preference"),
    ],
)
def test_a_format_reads_all_columns_that_the_recipe_maps(
    kind: str, values: dict[str, Any], columns: dict[str, str], format: str
) -> None:
    """Other columns of a row, which would fit a format before it, as `messages` of open-r1/OpenR1-Math-220k, do not count."""
    assert detect(values, "auto", columns, kinds.load(kind)) == format


def test_mapped_columns_that_no_format_reads_are_refused() -> None:
    row = {"messages": [USER, HELLO], "question": "a", "answer": "b"}
    with pytest.raises(
        UserError, match="columns: no format of demonstrations has `label`; the formats have messages: mess"
    ):
        detect(row, "auto", {"label": "answer"}, kinds.load("demonstrations"))
    with pytest.raises(UserError, match="no format of demonstrations has `messages` and `completion`"):
        detect(row, "auto", {"messages": "messages", "completion": "answer"}, kinds.load("demonstrations"))
    with pytest.raises(
        UserError, match="looked for `prompt` and `completion`, or `chosen` and `rejected`; the first row has"
    ):
        detect(row, "auto", {"prompt": "question"}, kinds.load("demonstrations"))


def test_unknown_role_in_columns_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no role 'promt'; did you mean 'prompt'"):
        check_columns({"promt": "question"})


def test_format_that_cannot_serve_the_kind_is_refused() -> None:
    with pytest.raises(UserError, match="'text' does not provide preference pairs; choose one of preference, hh"):
        check_format("text", kinds.load("preferences"))
