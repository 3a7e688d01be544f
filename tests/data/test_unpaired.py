"""Labelled completions: the forms of labels in files, pairs that are split, and refused rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from alignment_core.errors import DataError, UserError
from tests.data.conftest import Build, Write

ROWS = [{"prompt": f"p{number % 8}", "completion": f"c{number}", "label": bool(number % 2)} for number in range(24)]
PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}


def read(data: Any) -> list[tuple[str, str, bool]]:
    rows = data.train.to_pylist()
    return [(row["prompt"].removeprefix("<user>")[:-11], row["completion"], row["label"]) for row in rows]


def test_rows_are_read_and_held_out_by_prompt(built: Build, jsonl: Write) -> None:
    data = built(jsonl(ROWS), "unpaired", test_rows=3, shuffle=False)
    assert (data.train.num_rows, data.test.num_rows) == (21, 3)
    assert not set(data.train["prompt"].to_pylist()) & set(data.test["prompt"].to_pylist())
    assert data.train.schema.field("label").type == pa.bool_()
    assert set(read(data)) <= {(row["prompt"], row["completion"], row["label"]) for row in ROWS}
    first = data.train.to_pylist()[0]
    assert first["completion_ids"] == [*first["completion"].encode(), 257], "with EOS"


@pytest.mark.parametrize(
    ("label", "meant"),
    [(1, True), (0, False), (1.0, True), ("true", True), ("False", False), ("1", True), ("0", False)],
)
def test_labels_may_be_numbers_or_text(label: object, meant: bool, built: Build, jsonl: Write) -> None:
    assert read(built(jsonl([{**ROWS[0], "label": label}]), "unpaired")) == [("p0", "c0", meant)]


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (2, "the number 2"),
        (0.5, "the number 0.5"),
        ("good", "the text 'good'"),
        (None, "null"),
        ([True], "a list of 1"),
    ],
)
def test_any_other_label_is_refused_by_row_and_column(label: object, says: str, built: Build, jsonl: Write) -> None:
    path = jsonl([ROWS[0], {"prompt": "a", "completion": "b", "good": label}])
    with pytest.raises(DataError, match=r"train.jsonl:2: there is no `label`; the row has prompt, completion, good"):
        built(path, "unpaired")
    columns = {"sources": [{"path": str(jsonl([{"prompt": "a", "completion": "b", "good": label}]))}]}
    columns["sources"][0]["columns"] = {"label": "good"}  # type: ignore[assignment]
    with pytest.raises(DataError, match=rf"train.jsonl:1: `good` is {says.replace('[', '.')}; true or false is needed"):
        built(columns, "unpaired")


def test_labels_of_csv_and_parquet_keep_their_types(built: Build, tmp_path: Any) -> None:
    import pyarrow.parquet as pq

    (tmp_path / "rows.csv").write_text("prompt,completion,label\na,b,True\nc,d,0\n")
    assert read(built(tmp_path / "rows.csv", "unpaired", shuffle=False)) == [("a", "b", True), ("c", "d", False)]
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"], "label": [False]}), tmp_path / "rows.parquet")
    assert read(built(tmp_path / "rows.parquet", "unpaired")) == [("a", "b", False)]


def test_a_pair_becomes_a_desirable_and_an_undesirable_row(built: Build, jsonl: Write) -> None:
    data = built(jsonl([PAIR]), "unpaired", shuffle=False)
    assert read(data) == [("p", "good", True), ("p", "bad", False)]
    assert data.statistics["rows"]["split"] == 1
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "good"}]
    talks = {"chosen": turns, "rejected": [turns[0], {**turns[1], "content": "bad"}]}
    hh = {"chosen": "\n\nHuman: p\n\nAssistant: good", "rejected": "\n\nHuman: p\n\nAssistant: bad"}
    for pair in (talks, hh):
        assert read(built(jsonl([pair]), "unpaired", shuffle=False)) == read(data)


def test_untrainable_rows_are_dropped_and_counted(built: Build, jsonl: Write) -> None:
    rows = [*ROWS, {**ROWS[0], "completion": " "}, {**ROWS[0], "completion": "x" * 30}]
    assert built(jsonl(rows), "unpaired", max_length=16).statistics["dropped"] == {"empty_completion": 1, "too_long": 1}
    pairs = [PAIR, {**PAIR, "rejected": "good"}, {**PAIR, "rejected": "x" * 30}]
    data = built(jsonl(pairs), "unpaired", max_length=16, shuffle=False)
    assert data.statistics["dropped"] == {"identical_pair": 1, "too_long": 1}
    assert read(data) == [("p", "good", True), ("p", "bad", False), ("p", "good", True)], "half of a pair is a row, too"
    cut = built(jsonl(rows[-1:]), "unpaired", max_length=16, overlong="truncate")
    assert cut.statistics["shortened"] == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "looked for `prompt` and `completion` and `label`"),
        ({"prompt": "", "completion": "a", "label": 1}, "`prompt` is empty"),
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}], "label": 1},
            "`completion` must be one assistant message after the prompt, not user",
        ),
    ],
)
def test_rows_of_another_kind_are_refused(row: dict[str, Any], says: str, built: Build, jsonl: Write) -> None:
    with pytest.raises(UserError, match=says):
        built(jsonl([row]), "unpaired")


def test_a_file_without_rows_is_refused(built: Build, jsonl: Write) -> None:
    with pytest.raises(UserError, match="no rows left of 0 rows"):
        built(jsonl([]), "unpaired")


def test_a_built_in_task_labels_its_answers(built: Build) -> None:
    data = built({"task": "reverse", "rows": 200, "options": {"correct": 0.5}}, "unpaired")
    for row in data.train.to_pylist():
        word = row["prompt"].split("reverse: ")[1][:4]
        assert row["label"] == (row["completion"] == word[::-1])
    assert 70 <= sum(data.train["label"].to_pylist()) <= 130  # 100 expected, standard deviation 7
