"""Answers with labelled steps: in the formats of TRL and Math-Shepherd, the place of each verdict, and refused rows."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data import tasks
from alignment_core.data.build import BuiltDataset, build
from alignment_core.data.pin import pin
from alignment_core.errors import DataError, UserError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from tests.data.conftest import Build, Write

ROW: dict[str, Any] = {"prompt": "1+2+3?", "completions": ["1+2=3", "3+3=7"], "labels": [True, False]}
EOS = 257


def with_layout(path: Any, tokenizer: Any, **settings: Any) -> BuiltDataset:
    config = DataConfig.model_validate({"sources": [str(path)]})
    return build(config, [pin(source) for source in config.sources], tokenizer, "stepwise", 0, settings=settings)


def test_each_step_is_judged_at_its_last_token_or_at_a_placeholder(
    tokenizer: Any, plain_tokenizer: Any, jsonl: Write
) -> None:
    path = jsonl([ROW])
    (row,) = with_layout(path, plain_tokenizer).train.to_pylist()
    assert bytes(row["completion_ids"]).decode() == row["completion"] == "1+2=3\n3+3=7\n"
    assert (row["step_ends"], row["labels"]) == ([5, 11], [1.0, 0.0])
    (row,) = with_layout(path, tokenizer, separator="\n\n", placeholder="?").train.to_pylist()
    assert bytes(row["completion_ids"]).decode() == "1+2=3\n\n?3+3=7\n\n?"
    assert [chr(row["completion_ids"][place]) for place in row["step_ends"]] == ["?", "?"]
    assert row["prompt"] == "<user>1+2+3?<assistant>", "by the chat template"


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_separators_at_the_end_of_a_step_are_taken_off(separator: str, plain_tokenizer: Any, jsonl: Write) -> None:
    """The same row as one whose steps end without them, as each step is followed by the separator anyway."""
    ends = [separator, 2 * separator]
    steps = [step + end for step, end in zip(ROW["completions"], ends, strict=True)]
    (row,) = with_layout(jsonl([{**ROW, "completions": steps}]), plain_tokenizer, separator=separator).train.to_pylist()
    (same,) = with_layout(jsonl([ROW]), plain_tokenizer, separator=separator).train.to_pylist()
    assert row == same


def test_the_verdict_on_the_last_step_counts(built: Build, plain_tokenizer: Any, jsonl: Write) -> None:
    """The model reads it: of 1,024 learned positions, a row of 1,024 tokens would need one more."""
    path, tokens = jsonl([ROW]), len("1+2+3?" + "1+2=3\n3+3=7\n")
    assert built(path, "stepwise", plain_tokenizer, max_length=tokens + 1).train.num_rows == 1
    with pytest.raises(DataError, match="too_long"):
        built(path, "stepwise", plain_tokenizer, max_length=tokens)
    cut = built(path, "stepwise", plain_tokenizer, max_length=tokens, overlong="truncate")
    assert cut.train["labels"].to_pylist() == [[1.0]]
    config = DataConfig.model_validate({"sources": [str(path)]})
    with pytest.raises(DataError, match=f"the row has {tokens + 1} tokens, but the model takes at most {tokens}"):
        build(config, [pin(config.sources[0])], plain_tokenizer, "stepwise", 0, context=tokens)


def test_a_step_that_is_only_separators_is_refused(plain_tokenizer: Any, jsonl: Write) -> None:
    path = jsonl([{**ROW, "completions": ["1+2=3", "##"]}])
    with pytest.raises(DataError, match=r"train\.jsonl:1: a step is nothing but the separator '#'"):
        with_layout(path, plain_tokenizer, separator="#")


@pytest.mark.parametrize("label", [[1, 0], ["+", "-"], ["true", "False"], [1.0, 0.0]])
def test_labels_are_truths_signs_or_probabilities(label: Any, built: Build, jsonl: Write) -> None:
    (row,) = built(jsonl([{**ROW, "labels": label}]), "stepwise").train.to_pylist()
    assert row["labels"] == [1.0, 0.0]
    (row,) = built(jsonl([{**ROW, "labels": [0.25, 0.5]}]), "stepwise").train.to_pylist()
    assert row["labels"] == [0.25, 0.5], "soft ones"


def test_math_shepherd_is_read_without_conversion(built: Build, jsonl: Write) -> None:
    text = "Ann has 2 pens. How many? Step 1: Two. ки\nStep 2: The answer is: 3 ки"
    labelled = "Ann has 2 pens. How many? Step 1: Two. +\nStep 2: The answer is: 3 -"
    (row,) = built(jsonl([{"input": text, "label": labelled, "task": "GSM8K"}]), "stepwise").train.to_pylist()
    assert row["prompt"] == "<user>Ann has 2 pens. How many?<assistant>", "as a user asks it, and as TRL converts it"
    assert row["completion"] == "Step 1: Two.\nStep 2: The answer is: 3\n"
    assert row["labels"] == [1.0, 0.0]
    for wrong, says in (
        ({"input": text, "label": text}, "is not `input` with . or - in place of each 'ки'"),
        ({"input": "Two. ки", "label": "Two. +"}, "1 have no question and 'Step 1:' before the first 'ки'"),
    ):
        with pytest.raises(DataError, match=says):
            built(jsonl([wrong]), "stepwise")


def test_rows_of_math_shepherd_with_a_mark_in_the_question_are_dropped_and_counted(built: Build, jsonl: Write) -> None:
    """Those that TRL's examples/datasets/math_shepherd.py lists."""
    text = "How many? Step 1: Two. ки\nStep 2: The answer is: 3 ки"
    rows = [text, f"Round ки to the nearest. {text}", f"Find the arithmetic mean. ки {text}"]
    data = built(jsonl([{"input": row, "label": row.replace("ки", "+")} for row in rows]), "stepwise")
    assert (data.train.num_rows, data.statistics["dropped"]) == (1, {"no_first_step": 2})


def test_the_text_of_math_shepherd_can_be_laid_out_as_its_own_model_reads_it(jsonl: Write) -> None:
    """By the settings in docs/methods/process-reward-model.md, the ids are those of the data set's own text."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens(["ки"])
    text = "Ann has 2 pens. How many? Step 1: Two. ки\nStep 2: The answer is: 3 ки"
    path = jsonl([{"input": text, "label": text.replace("ки", "+")}])
    settings = {"separator": "\n", "placeholder": "ки", "placeholder_prefix": " ", "answer_prefix": " "}
    (row,) = with_layout(path, tokenizer, **settings).train.to_pylist()
    assert row["prompt_ids"] + row["completion_ids"] == tokenizer(text)["input_ids"]
    mark = tokenizer.convert_tokens_to_ids("ки")
    assert [place for place, token in enumerate(row["completion_ids"]) if token == mark] == row["step_ends"]
    assert bytes(row["prompt_ids"]).decode() == row["prompt"] == "Ann has 2 pens. How many? "


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": [True]}, "`completions` has 2 steps and `labels` 1 labels"),
        ({"labels": [True, 2]}, r"`labels\[1\]` is the number 2; true, false"),
        ({"labels": [True, "good"]}, r"`labels\[1\]` is the text 'good'"),
        ({"labels": True}, "`labels` is true; a list with an entry for each step"),
        ({"completions": []}, "`completions` is an empty list"),
        ({"completions": ["a", " "]}, r"`completions\[1\]` is the text ' '; the text of a step"),
        ({"completions": ["a\nb", "c"]}, r"a step contains the separator '\\n'"),
        ({"prompt": ""}, "`prompt` is empty"),
    ],
)
def test_rows_that_are_none_are_refused_by_row_and_column(
    change: dict[str, Any], says: str, built: Build, jsonl: Write
) -> None:
    with pytest.raises(DataError, match=rf"train.jsonl:1: {says}"):
        built(jsonl([{**ROW, **change}]), "stepwise")


def test_a_placeholder_is_one_token(plain_tokenizer: Any, jsonl: Write) -> None:
    with pytest.raises(UserError, match="`placeholder`: 'ab' is 2 tokens of this tokenizer"):
        with_layout(jsonl([ROW]), plain_tokenizer, placeholder="ab")


def test_steps_that_do_not_fit_are_cut_off_whole(built: Build, jsonl: Write) -> None:
    path, prompt = jsonl([ROW]), len(b"1+2+3?") + 4  # with the template's text around it
    assert built(jsonl([ROW, {**ROW, "completions": ["x" * 300, "y"]}]), "stepwise", max_length=64).statistics[
        "dropped"
    ] == {"too_long": 1}
    data = built(path, "stepwise", max_length=prompt + 9, overlong="truncate")
    (row,) = data.train.to_pylist()
    assert (row["completion"], row["step_ends"], row["labels"]) == ("1+2=3\n", [5], [1.0])
    assert data.statistics["shortened"] == 1


def test_a_task_with_steps_labels_each_and_a_task_without_is_refused(built: Build) -> None:
    data = built({"task": "highest", "rows": 200, "options": {"correct": 0.5}}, "stepwise").train.to_pylist()
    right = 0
    for row in data:
        digits = row["prompt"].split("highest: ")[1].split("\n")[0].split(" ")
        before = digits[0]
        for step, digit, label in zip(row["completion"].splitlines(), digits[1:], row["labels"], strict=True):
            assert step[:3] == f"{before},{digit}", "the next step continues from the wrong one"
            assert label == (step[4:] == max(before, digit))
            before = step[4:]
        right += all(row["labels"])
    assert 70 <= right <= 130  # 100 expected, standard deviation 7
    problem = next(tasks.problems("highest", "train", 1, 0))
    assert problem.mistake() != problem.answer
    with pytest.raises(UserError, match="answers to the built-in task 'reverse' have no steps; those to `highest` do"):
        built({"task": "reverse", "rows": 3}, "stepwise")
