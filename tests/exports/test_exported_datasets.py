"""A data set artifact: ``datasets`` and pandas read it, and every kind of rows has its documented columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest

from alignment_core.data.build import build, write
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import DataConfig

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "demonstrations": ({"prompt": "say {0}", "completion": "it is {0}"}, "input_ids"),
    "preferences": ({"prompt": "say {0}", "chosen": "it is {0}", "rejected": "it is not {0}"}, "chosen_ids"),
    "unpaired": ({"prompt": "say {0}", "completion": "it is {0}", "label": True}, "completion_ids"),
    "prompts": ({"prompt": "say {0}", "label": "{0}"}, "prompt_ids"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_public_readers_read_the_rows_that_were_built(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    row, column = KINDS[kind]
    rows = [
        {name: value.format(n) if isinstance(value, str) else value for name, value in row.items()} for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = DataConfig.model_validate({"sources": [str(tmp_path / "rows.jsonl")], "test_rows": 3})
    built = build(data, [pin(source) for source in data.sources], byte_tokenizer(), kind, 0)
    write(built, tmp_path / "data")
    files = {split: str(tmp_path / "data" / f"{split}.parquet") for split in ("train", "test")}
    public = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    for split, size in (("train", 9), ("test", 3)):
        frame = pandas.read_parquet(files[split])
        expected = [list(values[column]) for values in built.of(split)]
        assert len(expected) == size
        assert [list(values) for values in public[split][column]] == expected
        assert [list(values) for values in frame[column]] == expected
        assert set(public[split].column_names) == set(frame.columns) == set(built.kind.columns)
