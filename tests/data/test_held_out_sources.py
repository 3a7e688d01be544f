"""Separate test sets: held-out sources instead of a share of the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.build import BuiltDataset
from alignment_core.data.pin import pin
from alignment_core.errors import DataError
from alignment_core.recipes.sections.data import DataConfig, DataSource

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]


def rows(*numbers: int, end: str = "") -> list[dict[str, str]]:
    return [{"prompt": f"p{number}", "completion": f"c{number}{end}"} for number in numbers]


def sources(train: Path, test: Path, **fields: Any) -> dict[str, Any]:
    return {"sources": [{"path": str(train), **fields}, {"path": str(test), "held_out": True}]}


def prompts(table: Any) -> set[str]:
    return {text.split("<user>")[1].split("<")[0] for text in table["text"].to_pylist()}


@pytest.mark.parametrize("fields", [{}, {"weight": 1.0}])
def test_all_rows_of_a_held_out_source_are_the_test_set_and_none_of_its_prompts_is_trained_on(
    built: Build, jsonl: Write, fields: dict[str, Any]
) -> None:
    train = jsonl(rows(*range(20)) + rows(3, end=" again"))
    test = jsonl(rows(3, 40, 41, end="!"), name="test.jsonl")
    data = built(sources(train, test, **fields), "demonstrations", shuffle=False)
    assert data.test.num_rows == 3
    assert data.train.num_rows == 19
    assert prompts(data.train) == {f"p{number}" for number in range(20) if number != 3}
    assert prompts(data.test) == {"p3", "p40", "p41"}
    assert data.statistics["dropped"] == {"prompt_of_test": 2}
    of_train, of_test = data.statistics["sources"]
    assert (of_train["train"], of_train["test"]) == (19, 0)
    assert (of_test["train"], of_test["test"], of_test["unused"]) == (0, 3, 0)


def test_an_empty_training_or_test_set_is_refused(built: Build, jsonl: Write) -> None:
    train, test = jsonl(rows(1, 2)), jsonl(rows(2, 1), name="test.jsonl")
    with pytest.raises(DataError, match="have a prompt of a source that is held out"):
        built(sources(train, test), "demonstrations")
    empty = jsonl([{"prompt": "p", "completion": ""}], name="test.jsonl")
    with pytest.raises(DataError, match="no rows left of the sources that are held out"):
        built(sources(train, empty), "demonstrations")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl", "held_out": True}], "test_rows": 5},
            "`test_rows` and a source with `held_out` are two test sets",
        ),
        ({"path": "a.jsonl", "held_out": True}, "all are `held_out`, so there is nothing to train on"),
        (
            {"sources": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "held_out": True, "weight": 1}]},
            "is not part of the mixture: remove its weight",
        ),
    ],
)
def test_two_test_sets_or_no_training_set_are_refused_in_a_sentence(content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        DataConfig.model_validate(content)


def test_the_key_of_a_source_that_is_not_held_out_is_unchanged(jsonl: Write) -> None:
    path = str(jsonl(rows(1)))
    plain, held_out = (pin(DataSource(path=path, held_out=held_out)).content() for held_out in (False, True))
    assert held_out == {**plain, "held_out": True}
    assert not DataConfig.model_validate({"path": path}).has_test_rows
    assert DataConfig.model_validate({"sources": [{"path": path}, {"path": path, "held_out": True}]}).has_test_rows
