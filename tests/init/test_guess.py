"""The kind of rows is guessed from columns and contents, for any names of columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.data import kinds
from alignment_core.errors import DataError, UserError
from alignment_core.init import recipe, rows
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.names import OTHER_NAMES, called
from alignment_core.init.recipe import InitRequest
from alignment_core.init.verifying import ends_with_final, is_final, verifier_of
from alignment_core.recipes.row_plugins import formats
from tests.init.rows_of_kinds import ROWS, N, jsonl


def guessed(folder: Path, content: list[dict[str, Any]], **options: Any) -> tuple[str, ColumnMapping]:
    file = jsonl(folder / "rows.jsonl", content)
    method, _, mapping = recipe.choose_method(
        InitRequest(str(file), folder / "recipe.yaml", **options), rows.find(str(file))
    )
    return method, mapping


@pytest.mark.parametrize("name", ROWS)
def test_rows_suggest_a_method_under_any_of_their_names(name: str, tmp_path: Path) -> None:
    method, columns, content = ROWS[name]
    guess, mapping = guessed(tmp_path, content)
    assert guess == method
    assert mapping.columns == columns


@pytest.mark.parametrize("role", OTHER_NAMES)
def test_every_role_with_alternative_names_belongs_to_a_format(role: str) -> None:
    format, _, plain = role.rpartition(".")
    assert plain in kinds.roles()
    assert not format or format in formats()


@pytest.mark.parametrize(("likelier", "other"), [("response", "reply"), ("completion", "response")])
def test_the_likelier_of_two_columns_is_chosen(likelier: str, other: str, tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", other: f"long answer {n}", likelier: f"a {n}"} for n in N]
    assert guessed(tmp_path, content)[1].columns["completion"] == likelier


def test_a_column_that_the_user_names_is_taken(tmp_path: Path) -> None:
    content = [{"prompt": f"q {n}", "answer": f"long answer {n}", "response": f"a {n}"} for n in N]
    _, mapping = guessed(tmp_path, content, columns={"completion": "answer"})
    assert mapping.columns == {"prompt": "prompt", "completion": "answer"}
    odd = [{"Frage": f"q {n}", "Antwort": f"a {n}"} for n in N]
    method, mapping = guessed(tmp_path, odd, columns={"prompt": "Frage", "completion": "Antwort"})
    assert (method, mapping.columns) == ("sft", {"prompt": "Frage", "completion": "Antwort"})


def test_answers_in_words_are_imitated_and_bare_numbers_are_verified(tmp_path: Path) -> None:
    assert guessed(tmp_path, [{"question": f"capital {n}?", "answer": "Paris"} for n in N])[0] == "sft"
    assert guessed(tmp_path, [{"question": f"{n}+1?", "answer": f"{n + 1}"} for n in N])[0] == "rl"


def test_a_few_rows_of_another_kind_do_not_change_the_guessed_method(tmp_path: Path) -> None:
    content: list[dict[str, Any]] = [{"prompt": f"q {n}", "completion": f"a {n}"} for n in N]
    content[7] = {"prompt": "", "completion": None}
    assert guessed(tmp_path, content)[0] == "sft"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("preferences", "kto"),
        ("preferences", "reward-model"),
        ("preferences", "iterative-dpo"),
        ("preferences", "sft"),
        ("worked solutions", "rl"),
        ("prompt and label", "rejection-sampling"),
        ("messages", "generate"),
        ("text", "sft"),
    ],
)
def test_a_requested_method_reads_every_kind_of_rows_that_it_supports(name: str, method: str, tmp_path: Path) -> None:
    assert guessed(tmp_path, ROWS[name][2], method=method)[0] == method


def test_methods_go_by_their_other_names_too(tmp_path: Path) -> None:
    assert guessed(tmp_path, ROWS["prompt and label"][2], method="grpo")[0] == "rl"
    assert guessed(tmp_path, ROWS["text"][2], method="continued_pretraining")[0] == "continued-pretraining"


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("dop", "--method dop: there is no such method; did you mean 'dpo'?"),
        ("merge", "--method merge: rows alone do not say enough for it: `align init --from merge` copies a recipe"),
        ("dpo", "looked for `chosen` and `rejected`; the first row has prompt, completion"),
    ],
)
def test_a_method_that_init_cannot_start_is_refused_with_the_reason(method: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s).*") as error:
        guessed(tmp_path, ROWS["prompt and completion"][2], method=method)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"a": 1, "b": 2},
            "the kind of its rows is unknown: the first has a, b; name the columns with --column ROLE=NAME",
        ),
        ({}, "the first has no columns"),
        ({"conversations": [{"from": "narrator", "value": "hi"}]}, "`conversations[0].from` is 'narrator'"),
    ],
)
def test_rows_that_nothing_reads_are_described(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        guessed(tmp_path, [content] * 3)
    assert sentence in str(error.value)


def test_names_match_regardless_of_case_and_separators() -> None:
    assert called(("prompt_text", "question"), ["Question", "Prompt Text", "x"]) == ["Prompt Text", "Question"]


@pytest.mark.parametrize("label", ["18", "-3.5", "$1,000", "1/2", "50%", r"\boxed{x^2}", "$x+1$"])
def test_a_bare_answer_in_mathematics_is_final(label: str) -> None:
    assert is_final(label)


@pytest.mark.parametrize("label", ["Paris", "", "It is 18", "a/b and c", "b) 12"])
def test_other_answers_are_not_final(label: str) -> None:
    assert not is_final(label)


def test_the_verifier_is_chosen_by_the_form_of_the_labels() -> None:
    assert ends_with_final("2+2 is 4\n#### 4")
    assert verifier_of(["2+2 is 4\n#### 4"] * 9) == "math"
    assert verifier_of(["2+2 is 4\n#### 4"] * 9, worked=False) is None
    assert verifier_of(['{"inputs": ["1"], "outputs": ["2"]}']) == "code"
    assert verifier_of(["Paris", "4"]) is None
    assert verifier_of([]) is None
