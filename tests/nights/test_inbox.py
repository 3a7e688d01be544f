"""Rows of the inbox: valid rows, and rows that count as equal."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data.files import NumberedRow, read_file
from alignment_core.errors import UserError
from alignment_core.nights.inbox import Inbox, read_inbox
from alignment_core.recipes import DataSource
from tests.nights.conftest import pair


@pytest.fixture
def read(store, inbox):
    def reading(path: str | Path = inbox, seen: Inbox | None = None, **source: object) -> Inbox:
        known = {row.digest for row in seen.rows} if seen else set()
        return read_inbox([DataSource(path=str(path), **source)], known, store)

    return reading


def prompts(inbox: Inbox) -> list[str]:
    return [row.pair["prompt"] for row in inbox.rows]


def test_rows_are_in_order_of_file_names_and_lines_regardless_of_times(read, drop, inbox):
    drop("b.jsonl", pair(3))
    drop("a.jsonl", pair(2), pair(1))
    os.utime(inbox / "a.jsonl", (2e9, 2e9))
    os.utime(inbox / "b.jsonl", (0, 0))
    assert prompts(read()) == ["prompt 2", "prompt 1", "prompt 3"]
    assert [row.where for row in read().rows] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]


def test_repeated_and_reformatted_rows_count_once(read, drop):
    drop("a.jsonl", pair(1), pair(1))
    drop("b.jsonl", '{"rejected": "no",   "prompt": "prompt 1", "chosen": "y\\u0065s"}\n')
    assert len(read().rows) == 1


def test_rows_that_differ_in_any_column_are_two_rows(read, drop):
    drop("a.jsonl", pair(1, judge="ann"), pair(1, judge="bob"))
    assert len(read().rows) == 2


def test_new_rows_of_an_old_file_are_read_and_old_rows_of_a_new_file_are_not(read, drop):
    drop("a.jsonl", pair(1))
    first = read()
    drop("a.jsonl", pair(2))
    drop("copy.jsonl", pair(1))
    assert prompts(read(seen=first)) == ["prompt 2"]


def test_malformed_rows_are_listed_with_file_line_and_reason_and_the_others_taken(read, drop):
    drop("a.jsonl", pair(1), "{broken}\n", {"prompt": "p", "chosen": "c"}, pair(2, chosen=7), pair(3, margin=1e999))
    drop("b.jsonl", '["a list"]\n', "[" * 100_000 + "\n", pair(4, note="\ud800"), pair(5))
    read_inbox = read()
    assert prompts(read_inbox) == ["prompt 1", "prompt 5"]
    places = [line.split(": ")[0] for line in read_inbox.malformed]
    assert places == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4", "a.jsonl:5", "b.jsonl:1", "b.jsonl:2", "b.jsonl:3"]
    assert "a.jsonl:2: is not valid JSON" in read_inbox.malformed[0]
    assert "`chosen` is the number 7; text or a list of messages is needed" in read_inbox.malformed[2]


def test_a_mended_row_is_a_new_row(read, drop, inbox):
    drop("a.jsonl", pair(1), '{"prompt": "prompt 2"}\n')
    first = read()
    assert len(first.malformed) == 1
    (inbox / "a.jsonl").write_text(json.dumps(pair(1)) + "\n" + json.dumps(pair(2)) + "\n")
    second = read(seen=first)
    assert prompts(second) == ["prompt 2"]
    assert second.malformed == []


def test_a_last_line_that_is_half_written_is_left_for_the_next_time(read, drop):
    line = json.dumps(pair(2))
    drop("a.jsonl", pair(1), line[:20])
    first = read()
    assert prompts(first) == ["prompt 1"]
    assert first.malformed == []
    drop("a.jsonl", line[20:])  # whole, though without a newline
    assert prompts(read(seen=first)) == ["prompt 2"]


def test_a_row_of_csv_counts_only_with_its_newline(read, inbox):
    whole = "prompt,chosen,rejected\nprompt 1,yes,no\nprompt 2,yes,nothing\n"
    for end in range(len(whole) - len("prompt 2,yes,nothing\n"), len(whole)):
        (inbox / "a.csv").write_text(
            whole[:end]
        )  # killed in the middle: its fields may be complete, the last one is not
        assert prompts(read()) == ["prompt 1"]
        assert read().malformed == []
    assert read().looked[0].endswith("1 row, 1 new; a.csv: the last line counts once it ends with a newline")
    (inbox / "a.csv").write_text(whole)
    assert [row.pair["rejected"] for row in read().rows] == ["no", "nothing"]


def test_the_last_row_of_a_growing_file_is_left_for_the_next_time(read, inbox, monkeypatch):
    def read_and_grow(path: Path) -> Iterator[NumberedRow]:
        yield from read_file(path)
        with path.open("a") as file:  # the rest of the line arrives after the read and before the next
            file.write("hing\n")

    (inbox / "a.csv").write_text("prompt,chosen,rejected\nprompt 1,yes,no\nprompt 2,yes,not")
    monkeypatch.setattr("alignment_core.nights.inbox.read_file", read_and_grow)
    assert prompts(read()) == ["prompt 1"]


def test_searched_places_are_listed_with_their_files_and_rows(read, drop, inbox, monkeypatch):
    drop("a.jsonl", pair(1), pair(2), pair(1))
    first = read()
    assert first.looked == [f"{inbox}: 1 file, 3 rows, 2 new"]
    assert read(seen=first).looked == [f"{inbox}: 1 file, 3 rows, 0 new"]
    monkeypatch.chdir(inbox.parent)
    assert read(f"{inbox.name}/*.json").looked == [f"{inbox}/*.json: no files found"]  # not relative any more
    assert read("store:none/").looked == ["store:none/: no files found"]


def test_a_broken_line_before_the_last_is_malformed(read, drop):
    drop("a.jsonl", '{"prompt"\n', '{"prompt"')
    assert [line.split(": ")[0] for line in read().malformed] == ["a.jsonl:1"]


def test_a_file_that_cannot_be_read_is_listed_and_hides_no_other(read, drop, inbox):
    (inbox / "a.parquet").write_bytes(b"half a file")
    drop("b.json", "[{]")
    drop("c.jsonl", pair(1))
    read_inbox = read()
    assert prompts(read_inbox) == ["prompt 1"]
    assert [line.split(": ")[0] for line in read_inbox.malformed] == ["a.parquet", "b.json:1:3"]
    assert str(inbox) not in "".join(read_inbox.malformed)


def test_rows_of_different_formats_are_read_to_a_common_form(read, drop):
    human = {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"}
    drop("a.jsonl", pair(1), human)
    text, messages = (row.pair for row in read().rows)
    assert text["chosen"] == "yes"
    assert messages["prompt"] == [{"role": "user", "content": "hi"}]
    assert messages["rejected"] == [{"role": "assistant", "content": "no"}]


def test_columns_of_parquet_that_json_does_not_know_are_part_of_the_row(read, inbox):
    times = [pa.scalar(number, pa.timestamp("s")) for number in (1, 2, 2)]
    table = pa.table({"q": ["a"] * 3, "chosen": ["x"] * 3, "rejected": ["y"] * 3, "at": times})
    pq.write_table(table, inbox / "a.parquet")
    assert prompts(read(columns={"prompt": "q"})) == ["a", "a"]


def test_a_glob_reaches_into_folders_and_may_match_nothing(read, drop, inbox):
    assert read(f"{inbox}/**/*.jsonl").rows == []
    drop("monday/a.jsonl", pair(1))
    drop("tuesday/a.jsonl", pair(2))
    read_inbox = read(f"{inbox}/**/*.jsonl")
    assert [row.where for row in read_inbox.rows] == ["monday/a.jsonl:1", "tuesday/a.jsonl:1"]


def test_hidden_and_foreign_files_of_a_folder_are_no_rows(read, drop):
    drop(".a.jsonl.part", pair(1))
    drop(".b.jsonl", pair(2))
    drop("README.md", "rows\n")
    assert read() == Inbox()


def test_compressed_files_are_read_whole_and_truncated_files_are_listed(read, inbox):
    lines = "".join(json.dumps(pair(number)) + "\n" for number in range(3)).encode().removesuffix(b"\n")
    (inbox / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (inbox / "b.NDJSON").write_bytes(json.dumps(pair(7)).encode() + b"\n")
    assert prompts(read()) == ["prompt 0", "prompt 1", "prompt 2", "prompt 7"]
    (inbox / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-9])
    read_inbox = read()
    assert prompts(read_inbox)[-1] == "prompt 7"
    assert read_inbox.malformed == [
        "a.jsonl.gz: is not a readable .gz file: Compressed file ended before the end-of-stream marker was reached"
    ]


def test_a_folder_or_file_that_does_not_exist_is_refused(read, tmp_path):
    with pytest.raises(UserError, match="there is no such file or folder; a glob such as"):
        read(tmp_path / "nowhere")


def test_a_store_prefix_means_all_that_its_tags_name_and_have_named(read, store, tmp_path):
    previous = None
    for number in (1, 2):
        folder = tmp_path / f"app-{number}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text(json.dumps(pair(number)) + "\n")
        reference = store.publish(folder, "preferences")
        store.tags.move("preferences/app", reference, expected=previous, reason="export")
        previous = reference
    assert sorted(prompts(read("store:preferences/"))) == ["prompt 1", "prompt 2"]
    assert read("store:other/") == Inbox()


def test_data_sets_of_the_store_are_named_and_not_read(read, store, tmp_path):
    """Their prompts are rendered already, and test.parquet is held out."""
    for name in ("pairs", "app"):
        (tmp_path / name).mkdir()
    rows = {"prompt": ["<|im_start|>user\nhi<|im_end|>\n"], "chosen": ["yes"], "rejected": ["no"]}
    for split in ("train", "test"):
        pq.write_table(pa.table({**rows, "source": [split]}), tmp_path / "pairs" / f"{split}.parquet")
    (tmp_path / "pairs" / "statistics.json").write_text(json.dumps({"train_rows": 1}, indent=2) + "\n")
    data_set = store.publish(tmp_path / "pairs", "dataset")
    store.tags.move("preferences/round-1", data_set, expected=None, reason="by hand")
    inbox = read("store:preferences/")
    assert inbox == Inbox()
    assert inbox.looked == [
        "store:preferences/: no files found",
        f"store:preferences/: {data_set.short} not read: data sets are rendered with a chat template already; publish "
        "rows as they were before, as another kind of artifact",
    ]
    (tmp_path / "app" / "rows.jsonl").write_text(json.dumps(pair(1)) + "\n")
    store.tags.move("preferences/app", store.publish(tmp_path / "app", "preferences"), expected=None, reason="export")
    inbox = read("store:preferences/")
    assert (prompts(inbox), inbox.malformed) == (["prompt 1"], [])
    assert inbox.looked[0] == "store:preferences/: 1 file, 1 row, 1 new"
    assert data_set.short in inbox.looked[1]
