"""A folder is read as by ``datasets.load_dataset(folder)``, and files that are left out are named.

The expected rows come from the library itself: it loads every layout, and its splits are compared with ours row by row.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data import kinds
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.errors import DataError, UserError
from alignment_core.recipes.sections.data import DataSource


def rows_of(name: str) -> list[dict[str, str]]:
    return [{"text": f"{name} {number}"} for number in range(2)]


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def write(folder: Path, *names: str) -> Path:
    """Files of two rows each, which say the name of their file."""
    for name in names:
        path, rows = folder / name, rows_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path)
            continue
        lines = [json.dumps(row) for row in rows]
        if ".csv" in name:
            lines = ["text", *(row["text"] for row in rows)]
        content = "".join(line + "\n" for line in lines).encode()
        path.write_bytes(PACKERS.get(path.suffix, bytes)(content))
    return folder


def pinned(folder: Path, **fields: Any) -> PinnedSource:
    return pin(DataSource(path=str(folder), **fields))


def texts(folder: Path, **fields: Any) -> list[str]:
    located = pinned(folder, **fields).read(0, 0, kinds.load("demonstrations"))
    return [row["text"] for _, row in located if isinstance(row, dict)]


LAYOUTS = {
    "one split": ["a.jsonl", "b.jsonl"],
    "files named by splits": ["train.jsonl", "validation.jsonl", "test.jsonl"],
    "other words for splits": ["training-0.jsonl", "dev.jsonl", "my-eval.jsonl", "evaluation_2.jsonl"],
    "numbered files": ["train_0.csv", "train_1.csv", "test_0.csv"],
    "a word in the middle": ["wiki.train.0.jsonl", "wiki.test.0.jsonl"],
    "no word of a split": ["trainings.jsonl", "testimony.jsonl"],
    "shards in data": [
        *(f"data/train_sft-0000{shard}-of-00002.parquet" for shard in (0, 1)),
        "data/train_prefs-00000-of-00001.parquet",
        "data/test_sft-00000-of-00001.parquet",
        "other.parquet",
    ],
    "shards of no split": ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"],
    "shards beside data": ["wiki-train-00000-of-00001.parquet", "wiki-test-00000-of-00001.parquet"],
    "folders named by splits": ["train/a.jsonl", "train/deep/b.jsonl", "test/a.jsonl", "c.jsonl"],
    "folders with more in their names": ["my-train/a.jsonl", "valid_1/a.jsonl"],
    "folders below data": ["data/train/a.jsonl", "data/test/a.jsonl"],
    "files in folders": ["x/a.jsonl", "y/z/b.jsonl", "c.jsonl"],
    "the most frequent suffix": ["a.csv", "b.csv", "c.jsonl"],
    "equally frequent suffixes": ["a.jsonl", "b.csv"],
    "suffixes of JSON": ["a.jsonl", "b.ndjson", "c.json", "d.csv"],
    "compressed files": ["a.jsonl.gz", "b.jsonl.bz2", "c.jsonl.xz", "d.jsonl"],
    "compressed tables": ["a.csv.gz", "b.csv"],
    "suffixes in capitals": ["a.jsonl", "B.JSONL"],
    "hidden files": ["a.jsonl", ".b.jsonl", ".cache/c.jsonl", "__pycache__/d.jsonl"],
    "settings": ["a.parquet", "b.parquet", "config.json", "model/tokenizer.json", "model/generation_config.json"],
}
NAMED = {
    "other words for splits": [],
    "shards in data": ["other.parquet"],
    "folders named by splits": ["c.jsonl"],
    "the most frequent suffix": ["c.jsonl"],
    "equally frequent suffixes": ["b.csv"],
    "suffixes of JSON": ["d.csv"],
    "suffixes in capitals": ["B.JSONL"],
}
"""Which files are left out."""


@pytest.fixture
def loaded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, list[str]]]:
    import datasets

    cache = tmp_path_factory.mktemp("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)

    def load(folder: Path, name: str | None = None) -> dict[str, list[str]]:
        dataset = datasets.load_dataset(str(folder), name, cache_dir=str(cache))
        return {str(split): list(rows["text"]) for split, rows in dataset.items()}

    return load


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_has_the_splits_and_rows_that_datasets_finds(tmp_path: Path, layout: str, loaded: Any) -> None:
    folder = write(tmp_path / "folder", *LAYOUTS[layout])
    expected = loaded(folder)
    assert {split: texts(folder, split=split) for split in expected} == expected
    with pytest.raises(UserError, match=f"has no split 'absent'; it has {', '.join(expected)}$"):
        pinned(folder, split="absent")
    notes = [note for split in expected for note in pinned(folder, split=split).notes if "left out" in note]
    left_out = NAMED.get(layout, [])
    assert set(notes) == ({f"left out of the folder, as `datasets` does: {', '.join(left_out)}"} if left_out else set())


README = """---
license: mit
configs:
- config_name: pairs
  default: true
  data_files:
  - split: train_prefs
    path: "prefs/*.jsonl"
  - split: test_prefs
    path: ["held/a.jsonl", "held/b*"]
- config_name: plain
  data_files: "plain/**"
- config_name: folder
  data_dir: plain
---
# Title
"""


def test_the_configurations_of_a_readme_are_those_of_datasets(tmp_path: Path, loaded: Any) -> None:
    names = [
        "prefs/x.jsonl",
        "prefs/y.jsonl",
        "held/a.jsonl",
        "held/b1.jsonl",
        "plain/train.jsonl",
        "plain/in/test.jsonl",
    ]
    folder = write(tmp_path / "folder", *names)
    (folder / "README.md").write_text(README)
    for subset in (None, "plain", "folder"):
        expected = loaded(folder, subset)
        assert {split: texts(folder, split=split, subset=subset) for split in expected} == expected
    with pytest.raises(UserError, match="has no split 'train'; it has train_prefs, test_prefs"):
        pinned(folder)
    with pytest.raises(UserError, match="has no configuration 'other'; set `subset` to one of pairs, plain, folder"):
        pinned(folder, subset="other")
    (folder / "README.md").write_text(README.replace("  default: true\n", ""))
    with pytest.raises(UserError, match="has several configurations; set `subset` to one of pairs, plain, folder"):
        pinned(folder)


@pytest.mark.parametrize("files", ["[]", "{train: a.jsonl}"])
def test_a_configuration_of_another_form_is_named(tmp_path: Path, files: str) -> None:
    folder = write(tmp_path / "folder", "a.jsonl")
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n")
    with pytest.raises(UserError, match="`data_files` of 'default' must be a path, or a list"):
        pinned(folder)


def test_shards_beside_the_data_folder_are_separate_splits_too(tmp_path: Path) -> None:
    """`datasets` distinguishes them only below ``data/``; for the folder ``data`` itself it would mix them."""
    names = [f"{split}-00000-of-00001.parquet" for split in ("train_sft", "train_prefs", "test_sft", "test_prefs")]
    folder = write(tmp_path, *names)
    for name, split in zip(names, ("train_sft", "train_prefs", "test_sft", "test_prefs"), strict=True):
        assert texts(folder, split=split) == [row["text"] for row in rows_of(name)]
    with pytest.raises(UserError, match="has no split 'train'; it has test_prefs, test_sft, train_prefs, train_sft"):
        pinned(folder)


def test_files_that_datasets_joins_to_a_split_are_reported_and_can_be_named(tmp_path: Path, loaded: Any) -> None:
    folder = write(tmp_path / "folder", "train_sft.jsonl", "train_prefs.jsonl", "test.jsonl")
    assert texts(folder) == loaded(folder)["train"]
    assert pinned(folder).notes == (
        "split 'train' reads train_prefs, train_sft together, as `datasets` does; `split: train_prefs` reads the file of this "
        "name alone",
    )
    assert texts(folder, split="train_sft") == [row["text"] for row in rows_of("train_sft.jsonl")]
    assert pinned(folder, split="train_sft").notes == ()


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("form", [".jsonl", ".NDJSON", ".csv", ".json", ".txt"])
def test_compressed_text_is_read_and_a_truncated_file_refused(tmp_path: Path, suffix: str, form: str) -> None:
    name = f"rows{form}{suffix}"
    write(tmp_path, name)
    rows_read = texts(tmp_path / name)
    expected = [row["text"] for row in rows_of(name)]
    assert rows_read == expected if form != ".txt" else [expected[0] in rows_read[0], len(rows_read)] == [True, 1]
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"{name}: is not a readable {suffix} file: "):
        texts(tmp_path / name)


def test_a_compressed_file_of_many_members_is_read_to_its_end(tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        parts = [pack(json.dumps({"text": str(number)}).encode() + b"\n") for number in range(3)]
        (tmp_path / f"rows.jsonl{suffix}").write_bytes(b"".join(parts))
        assert texts(tmp_path / f"rows.jsonl{suffix}") == ["0", "1", "2"]


def test_error_for_a_folder_without_rows_lists_its_files(tmp_path: Path) -> None:
    for name in ("a.tsv", "b.zip", "README.md", "script.py", "model/tokenizer_config.json.bak"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(
        UserError,
        match=r"there is no \.jsonl, .* file in this folder, only a\.tsv, b\.zip, model/tokenizer_config\.json\.bak$",
    ):
        pinned(tmp_path)


def test_rows_of_a_folder_name_their_subfolder(tmp_path: Path) -> None:
    folder = write(tmp_path, "train/x/a.jsonl", "train/y/a.jsonl")
    located = pinned(folder).read(0, 0, kinds.load("demonstrations"))
    assert [where for where, _ in located] == [f"train/{name}/a.jsonl:{line}" for name in "xy" for line in (1, 2)]


def test_the_relative_path_of_a_file_is_in_the_key_and_in_the_rows(tmp_path: Path) -> None:
    """Rows say in `source` where they were read, so that equal files at other places give another data set."""
    for folder, name in (("one", "train/a.jsonl"), ("other", "train/b/a.jsonl"), ("flat", "a.jsonl")):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True)
        path.write_text('{"text": "a"}\n')
    contents = {name: pinned(tmp_path / name).content() for name in ("one", "other", "flat")}
    assert [contents[name]["files"][0]["name"] for name in contents] == ["train/a.jsonl", "train/b/a.jsonl", "a.jsonl"]
    (tmp_path / "one").rename(tmp_path / "moved")
    assert pinned(tmp_path / "moved").content() == contents["one"]
    assert pinned(tmp_path / "flat/a.jsonl").content() == contents["flat"]
