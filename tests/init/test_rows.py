"""Rows are found in files and folders, and a file without rows is refused with the reason."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.errors import UserError
from alignment_core.init import rows
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.held_out import some_to_hold_out
from tests.init.rows_of_kinds import jsonl

CONTENT = [{"prompt": f"q {n}", "completion": f"a {n}"} for n in range(30)]
MAPPING = ColumnMapping("demonstrations", "prompt_completion", {"prompt": "prompt", "completion": "completion"})


def parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(CONTENT), path)
    return path


def arrow(path: Path) -> Path:
    table = pa.Table.from_pylist(CONTENT)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def commas(path: Path) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(CONTENT)
    return path


def listed(path: Path) -> Path:
    path.write_text(json.dumps(CONTENT))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda path: jsonl(path, CONTENT)),
        ("a.json", listed),
        ("a.csv", commas),
        ("a.parquet", parquet),
        ("a.arrow", arrow),
    ],
)
def test_rows_of_any_file_are_read(name: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    profile = rows.find(str(write(tmp_path / name)))
    assert (profile.first, profile.count, profile.all_counted) == (CONTENT, 30, True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no rows"),
        (b"\n\n \n", "has no rows"),
        (bytes(range(128, 256)) * 20, "none of its rows can be read: rows.jsonl:1 is not valid UTF-8: byte 0x80"),
        ('{"prompt": "q"}\n'.encode("utf-16"), "is UTF-16, and rows are read as UTF-8: iconv -f UTF-16 -t UTF-8"),
        (gzip.compress(b'{"prompt": "q"}\n'), "is compressed: unpack it with gunzip first"),
        (b"[1, 2]\n3\n", "rows.jsonl:1 is a list; a row is an object such as"),
        (b'{"prompt": "' + b"q" * (65 << 20), "rows.jsonl:1 is longer than 67108864 bytes"),
    ],
    ids=["empty", "blank", "binary", "UTF-16", "gzip", "lists", "one endless line"],
)
def test_a_file_without_rows_is_refused_with_the_reason(content: bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        rows.find(str(file))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("rowz.jsonl", "no such file or folder; did you mean"),
        ("rows.tsv", "rows are read from .jsonl"),
        ("*.nope", "file that fits it"),
    ],
)
def test_an_unknown_name_is_refused_without_mention_of_recipes(name: str, sentence: str, tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", CONTENT)
    jsonl(tmp_path / "rows.tsv", CONTENT)
    with pytest.raises(UserError) as error:
        rows.find(str(tmp_path / name))
    assert sentence in str(error.value)
    assert "--set" not in str(error.value)


def test_a_long_file_is_counted_to_some_point_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "COUNTED", 20)
    profile = rows.find(str(jsonl(tmp_path / "rows.jsonl", CONTENT)))
    assert (profile.count, profile.all_counted, profile.count_in_words) == (20, False, "more than 20 rows")


def test_large_rows_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "FIRST_BYTES", 150)
    profile = rows.find(str(jsonl(tmp_path / "rows.jsonl", [{"text": "x" * 90}] * 30)))
    assert (len(profile.first), profile.count) == (2, 30)


def test_a_glob_becomes_a_source_for_each_file(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / name, CONTENT) for name in ("b.jsonl", "a.jsonl")]
    profile = rows.find(str(tmp_path / "*.jsonl"))
    assert profile.sources == [{"path": str(file)} for file in sorted(files)]
    assert profile.count == 60


def test_a_folder_of_splits_comes_with_rows_to_measure_on(tmp_path: Path) -> None:
    for name in ("train", "test", "validation"):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    profile = rows.find(str(tmp_path))
    assert (profile.first, profile.count) == ([{"text": "train"}], 1)
    assert profile.test_sources == [{"path": str(tmp_path), "split": "test"}]


def test_files_of_rows_in_a_folder_are_candidates(tmp_path: Path) -> None:
    assert rows.candidates(tmp_path) == []
    (tmp_path / "README.txt").write_text("read me")
    assert rows.candidates(tmp_path) == ["README.txt"]
    (tmp_path / "package.json").write_text('"settings"')
    jsonl(tmp_path / ".hidden.jsonl", CONTENT)
    jsonl(tmp_path / "recipe.held-out.jsonl", CONTENT)
    jsonl(tmp_path / "train.jsonl", CONTENT)
    assert rows.candidates(tmp_path) == ["train.jsonl"]
    jsonl(tmp_path / "test.jsonl", CONTENT)
    assert rows.candidates(tmp_path) == ["."]
    jsonl(tmp_path / "more.jsonl", CONTENT)
    assert rows.candidates(tmp_path) == ["more.jsonl", "test.jsonl", "train.jsonl"]


def test_folder_in_which_no_file_is_named_by_a_split_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        jsonl(tmp_path / name, CONTENT)
    monkeypatch.setattr("os.walk", lambda folder: pytest.fail("it was searched"))
    assert rows.candidates(tmp_path) == ["a.jsonl", "b.jsonl"]
    jsonl(tmp_path / "train.jsonl", CONTENT)
    (tmp_path / "README.md").write_text("---\nconfigs: 3\n---\n")
    assert rows.candidates(tmp_path) == ["a.jsonl", "b.jsonl", "train.jsonl"]


def test_each_text_of_a_folder_is_a_row(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    assert rows.find(str(tmp_path)).first == [{"text": "a.txt"}, {"text": "b.txt"}]


def test_all_rows_of_a_prompt_are_held_out_and_more_rows_move_few(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [row for row in CONTENT for _ in range(2)])
    kept = some_to_hold_out(rows.find(str(file)).first, MAPPING, 4)
    assert len(kept) == 8
    assert len({row["prompt"] for row in kept}) == 4
    jsonl(file, [row for row in [*CONTENT, {"prompt": "new", "completion": "a"}] for _ in range(2)])
    again = some_to_hold_out(rows.find(str(file)).first, MAPPING, 4)
    assert len({row["prompt"] for row in kept} & {row["prompt"] for row in again}) >= 3


def test_nothing_is_held_out_of_copies_of_the_same_prompt() -> None:
    assert some_to_hold_out(CONTENT[:1] * 30, MAPPING, 4) == []


def test_a_split_of_a_folder_is_chosen_and_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split in ("test_gen", "test_sft", "train_prefs", "train_sft"):
        parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    parquet(tmp_path / "more.parquet")
    profile = rows.find(str(tmp_path))
    assert profile.sources == [{"path": str(tmp_path), "split": "train_prefs"}]
    assert profile.test_sources == []
    assert profile.notes == [
        "`split: train_prefs` is read, of test_gen, test_sft, train_prefs, train_sft: set another in the recipe",
        "left out of the folder, as `datasets` does: more.parquet",
    ]


@pytest.mark.parametrize(
    ("splits", "train", "test"),
    [
        (["train", "validation", "test"], "train", "test"),
        (["test_prefs", "test_sft", "train_sft"], "train_sft", "test_sft"),
        (["test", "train_sft"], "train_sft", "test"),
        (["train_sft", "train_prefs"], "train_sft", None),
        (["first", "eval"], "first", "eval"),
    ],
)
def test_the_split_to_measure_on_is_of_the_kind_that_is_trained(
    splits: list[str], train: str, test: str | None
) -> None:
    assert rows.split_to_train(splits) == train
    assert rows.split_to_test(splits, train) == test


def test_conversations_that_begin_alike_are_held_out_together() -> None:
    """Eight conversations each begin with one of ten questions; no first answer of a held-out one is left to train on."""

    def chat(number: int) -> dict[str, list[dict[str, str]]]:
        turns = [
            ("user", f"q{number % 10}"),
            ("assistant", f"a{number % 10}"),
            ("user", f"{number}"),
            ("assistant", "b"),
        ]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    every = [chat(number) for number in range(80)]
    kept = some_to_hold_out(every, ColumnMapping("demonstrations", "messages", {"messages": "messages"}), 8)
    first = {row["messages"][0]["content"] for row in kept}
    assert (len(kept), len(first)) == (16, 2)  # a fifth of the groups at most
    assert not first & {row["messages"][0]["content"] for row in every if row not in kept}


def test_folders_below_a_working_folder_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder may be a home or a project, with a README.md about something else."""
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    (tmp_path / "README.md").write_text("---\nconfigs: 3\n---\n")
    assert rows.candidates(tmp_path) == ["a.jsonl", "b.jsonl"]
    (tmp_path / "README.md").unlink()
    monkeypatch.setattr("os.walk", lambda folder: pytest.fail("it was searched"))
    assert rows.candidates(tmp_path) == ["a.jsonl", "b.jsonl"]
