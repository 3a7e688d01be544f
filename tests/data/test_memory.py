"""Data sets larger than memory: memory use does not grow with the texts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data.files import read_file
from alignment_core.disk_list import DiskList
from alignment_core.training.training_rows import training_rows

MEASURE = """
import json, random, resource, sys
from pathlib import Path

import numpy, pandas, pyarrow.parquet

from alignment_core.data.build import build, write
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from alignment_core.training.methods.sft import Sft
from alignment_core.training.training_rows import training_rows

folder = Path(sys.argv[1])


def use(megabytes):
    file, out = folder / f"{megabytes}.jsonl", folder / str(megabytes)
    random.seed(0)
    with file.open("w") as lines:
        for _ in range(megabytes * 50):
            lines.write(json.dumps({"text": "".join(random.choices("abcdefgh ", k=20_000))}) + "\\n")
    config = DataConfig.model_validate({"sources": [str(file)], "max_length": 1024, "test_rows": 20})
    write(build(config, [pin(source) for source in config.sources], byte_tokenizer(), "documents", 0), out)
    rows = training_rows(out / "train.parquet", Sft(), folder)
    assert len(rows) == 20 * (megabytes * 50 - 1) and rows[len(rows) - 1].number == len(rows) - 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


print(json.dumps([use(2), use(10)]))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_five_times_the_texts_take_hardly_more_memory(tmp_path: Path) -> None:
    out = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    few, many = json.loads(out.stdout.splitlines()[-1])
    assert many - few < 80, (
        "8 MB of text are 72 MB of ids and masks as training takes them, and 48 MB as the table has them"
    )


@pytest.fixture
def forty_megabytes(tmp_path: Path) -> Path:
    """A Parquet file of 40,000 rows of 256 random numbers, in blocks of 1,000 rows."""
    ids = np.random.default_rng(0).integers(0, 2**31, 40_000 * 256, np.int32)
    column = pa.ListArray.from_arrays(np.arange(0, len(ids) + 1, 256, np.int32), ids)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"input_ids": column}), path, row_group_size=1000)
    assert path.stat().st_size > 40e6
    return path


def test_rows_of_a_parquet_file_are_read_block_by_block(forty_megabytes: Path) -> None:
    before = pa.total_allocated_bytes()
    allocated = [pa.total_allocated_bytes() - before for number, _ in read_file(forty_megabytes) if number % 1000 == 0]
    assert len(allocated) == 40
    assert max(allocated) < 10e6, "a block of 1,000 rows takes 1 MB"


def test_training_rows_are_read_block_by_block(forty_megabytes: Path) -> None:
    class Measuring:
        """Makes no rows of a block, and notes the memory that is in use with it."""

        allocated: list[int] = []

        def rows(self, table: pa.Table) -> list[Any]:
            self.allocated.append(pa.total_allocated_bytes() - before)
            return []

    before = pa.total_allocated_bytes()
    method: Any = Measuring()
    training_rows(forty_megabytes, method, None)
    assert len(method.allocated) == 40
    assert max(method.allocated) < 10e6, "a block of 1,000 rows takes 1 MB"


def test_a_disk_list_returns_its_items(tmp_path: Path) -> None:
    def values() -> Iterator[dict[str, object]]:
        yield from ({"number": number, "text": "ä" * number} for number in range(300))

    spool = DiskList(tmp_path, values())
    assert list(spool) == list(values())
    assert (len(spool), spool[299], list(spool.chosen([7, 7, 0]))[1]["number"]) == (300, spool[299], 7)
    spool.append({"number": -1, "text": ""})
    assert spool[300] == {"number": -1, "text": ""}
    assert list(tmp_path.iterdir()) == [], "its file has no name, so that a killed run leaves none"
    for beyond in (-1, 301):
        with pytest.raises(IndexError):
            spool[beyond]
