"""Labels of prompts that are numbers: their text, written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from alignment_core.data.fields import Fields
from tests.data.conftest import Build, Write
from tests.data.test_data_build import column


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18, "18"),
        (18.0, "18"),
        (-3.0, "-3"),
        (-0.0, "0"),
        (0.5, "0.5"),
        (1e-5, "0.00001"),
        (1e21, "1000000000000000000000"),
        ("18.0", "18.0"),
        (None, None),
    ],
)
def test_a_label_may_be_a_number_of_any_kind(value: Any, text: str | None) -> None:
    assert Fields({"answer": value}, {"label": "answer"}).label() == text


@pytest.mark.parametrize("value", [True, math.nan, math.inf, [18]])
def test_a_label_that_is_no_number_and_no_text_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`label` is .+; text is needed"):
        Fields({"label": value}, {}).label()


def test_whole_numbers_of_parquet_and_json_are_the_same_labels(built: Build, jsonl: Write, tmp_path: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts, labels = ["a", "b", "c"], [18, 7.0, None]
    pq.write_table(pa.table({"prompt": prompts, "label": pa.array(labels, pa.float64())}), tmp_path / "rows.parquet")
    rows = [{"prompt": prompt, "label": label} for prompt, label in zip(prompts, labels, strict=True)]
    for path in (tmp_path / "rows.parquet", jsonl(rows)):
        assert column(built({"path": str(path), "shuffle": False}, "prompts"), "label") == ["18", "7", None]
