"""Columns of a row in its prompt, by a template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.build import BuiltDataset
from alignment_core.data.conditions import compared, filled
from alignment_core.data.fields import Fields
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.errors import DataError, UserError
from alignment_core.recipes.sections.data import DataConfig

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]
TEMPLATE = "{prompt} [quality={quality:.1f} by={meta.who}]"


def row(prompt: Any, quality: Any = 0.25, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "quality": quality, "meta": {"who": "us"}, **more}


def test_the_first_words_of_the_user_are_in_the_template_in_every_form_of_rows(built: Build, jsonl: Write) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "ask"}]
    rows = [
        row("ask", completion="c"),
        row(chat, completion="c"),
        row([*chat, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}], completion="c"),
    ]
    shown = "<user>ask [quality=0.2 by=us]<"
    texts = built(jsonl(rows), "demonstrations", prompt_template=TEMPLATE, shuffle=False).train["text"].to_pylist()
    assert [text.count(shown) for text in texts] == [1, 1, 1]
    assert "<user>more<" in texts[2]
    conversations = [{"messages": [*chat, {"role": "assistant", "content": "a"}], "quality": 3, "meta": {"who": "me"}}]
    (text,) = built(jsonl(conversations), "demonstrations", prompt_template=TEMPLATE).train["text"].to_pylist()
    assert "<user>ask [quality=3.0 by=me]<" in text
    prompts = built(jsonl([row("ask")]), "prompts", prompt_template=TEMPLATE).train
    assert shown in prompts["prompt"][0].as_py()
    pairs = [row("ask", chosen="b", rejected="c")]
    assert shown in built(jsonl(pairs), "preferences", prompt_template=TEMPLATE).train["prompt"][0].as_py()


def test_prompts_are_compared_without_the_template(built: Build, jsonl: Write) -> None:
    rows = [row(f"p{number // 4}", quality=number, completion=f"c{number}") for number in range(40)]
    plain = built(jsonl(rows), "demonstrations", test_rows=8)
    with_template = built(jsonl(rows), "demonstrations", test_rows=8, prompt_template=TEMPLATE)
    assert with_template.prompts == plain.prompts
    assert [data.test.num_rows for data in (plain, with_template)] == [8, 8]


INPUT = "{prompt}\n\n{input}"


def test_texts_that_the_template_adds_tell_prompts_apart(built: Build, jsonl: Write) -> None:
    """As in FinGPT/fingpt-sentiment-train: one instruction, an input for each row, and few different answers."""

    def rows(first: int) -> list[dict[str, str]]:
        return [{"prompt": "Rate it:", "input": f"news {n}", "completion": "good"} for n in range(first, first + 40)]

    data = built(jsonl(rows(0)), "demonstrations", prompt_template=INPUT, test_rows=8)
    assert (data.train.num_rows, data.test.num_rows, data.statistics["dropped"]) == (32, 8, {})
    joined = [{"prompt": f"Rate it:\n\nnews {n}", "completion": "good"} for n in range(40)]
    assert data.prompts == built(jsonl(joined), "demonstrations", test_rows=8).prompts, "as the model reads them"
    held_out = {"path": str(jsonl(rows(40), "test.jsonl")), "held_out": True}
    sources = [{"path": str(jsonl(rows(0)))}, held_out]
    data = built({"sources": sources}, "demonstrations", prompt_template=INPUT)
    assert (data.train.num_rows, data.test.num_rows, data.statistics["dropped"]) == (40, 40, {})
    held_out["path"] = str(jsonl(rows(30), "test.jsonl"))
    data = built({"sources": sources}, "demonstrations", prompt_template=INPUT)
    assert data.statistics["dropped"] == {"prompt_of_test": 10}, "the inputs of 30 to 39"


@pytest.mark.parametrize(
    ("template", "told_apart_by"),
    [
        (INPUT, "q\n\nx y"),
        ("{input}\n\n{prompt}", "x y\n\nq"),
        (f"Task: {INPUT} [by={{who}} quality={{quality:.0f}}]", "q\n\nx y"),
        ("{prompt} {quality} {number}", "q"),
        ("{prompt} {empty}", "q"),
        ("{prompt} [by={who}] {input}", "q"),
        ("Question: {prompt}\nAnswer: ", "q"),
    ],
)
def test_numbers_and_columns_in_other_text_tell_no_prompts_apart(template: str, told_apart_by: str) -> None:
    """Nor does the text of the template itself."""
    fields = Fields({"input": "x y", "who": "us", "quality": 3, "number": "0.50", "empty": " "}, {})
    assert compared(Prompt("q"), template, fields) == Prompt(told_apart_by)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"quality": None}, "`quality` is null; `prompt_template` needs it"),
        ({"quality": "good"}, "`quality` is 'good', which `prompt_template` cannot write as '.1f'"),
        ({"meta": {}}, r"there is no `meta\.who`; the row has"),
    ],
)
def test_a_row_that_cannot_fill_the_template_is_named(
    built: Build, jsonl: Write, bad: dict[str, Any], sentence: str
) -> None:
    rows = [row("p", completion="c"), row("p", completion="c") | bad]
    with pytest.raises(DataError, match=rf"train\.jsonl:2: {sentence}"):
        built(jsonl(rows), "demonstrations", prompt_template=TEMPLATE)


@pytest.mark.parametrize("empty", ["", " \n", None])
def test_a_column_without_text_is_left_out_with_the_white_space_before_it(empty: str | None) -> None:
    """Rows of Alpaca without an input: training would otherwise end their questions as no user does."""
    fields = Fields({"input": empty, "quality": 3, "zero": 0}, {})
    assert filled("{prompt}\n\n{input}", "q", fields) == "q"
    assert filled("{prompt}\n\n{input} [{quality}]\n", "q", fields) == "q [3]\n"
    assert filled("{prompt} {zero}", "q", fields) == "q 0"
    assert filled("{prompt}\n\n{input}", "q", Fields({"input": " x"}, {})) == "q\n\n x"
    assert filled("User: {prompt}\nAssistant: ", "q", fields) == "User: q\nAssistant: "


def test_plain_texts_have_no_prompt_to_write_in(built: Build, jsonl: Write) -> None:
    with pytest.raises((DataError, UserError), match="needs rows with a prompt; this one is a plain text"):
        built(jsonl([{"text": "t"}]), "demonstrations", prompt_template="{prompt} !")


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("[{quality}]", "has no {prompt}"),
        ("{prompt} {", "is not well formed"),
        ("{prompt} {}", "is not the name of a column"),
        ("{prompt} {quality!r}", "is not the name of a column"),
        ("{prompt} {quality[0]}", "is not the name of a column"),
    ],
)
def test_a_template_that_no_row_could_fill_gets_one_sentence(template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataConfig.model_validate({"path": "rows.jsonl", "prompt_template": template})
    assert "prompt_template" not in DataConfig.model_validate({"path": "rows.jsonl"}).model_dump()
