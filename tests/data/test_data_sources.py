"""Pinning and reading: every kind of file, every kind of damage, and names that do not exist."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.data import files, kinds
from alignment_core.data.fields import ArrowRow
from alignment_core.data.origins import LocatedRow
from alignment_core.data.pin import PinnedSource, pin
from alignment_core.data.sample_rows import sample_rows
from alignment_core.errors import DataError, UserError
from alignment_core.recipes.sections.data import DataSource

ROWS = [{"prompt": "a", "completion": "1"}, {"prompt": "b", "completion": "2"}]
KIND = kinds.load("demonstrations")


def read(path: Path, **fields: Any) -> list[LocatedRow]:
    return list(pin(DataSource(path=str(path), **fields)).read(0, 0, kinds.load("demonstrations")))


def refused(path: Path) -> list[str]:
    return [f"{where}: {row}" for where, row in read(path) if isinstance(row, str)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".csv":
        path.write_text("\n".join(",".join(row) for row in [rows[0].keys(), *(row.values() for row in rows)]))  # type: ignore[arg-type]
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if path.suffix == ".json" else "\n".join(lines))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow"])
def test_every_file_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = read(write(tmp_path / f"train{suffix}", ROWS))
    assert [row for _, row in rows] == ROWS
    first = 2 if suffix == ".csv" else 1  # line 1 of a CSV file is its header
    assert [where for where, _ in rows] == [f"train{suffix}:{first}", f"train{suffix}:{first + 1}"]


def test_data_set_saved_to_disk_is_read_with_or_without_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "dict")
    assert [row for _, row in read(tmp_path / "one")] == ROWS
    assert [row for _, row in read(tmp_path / "dict", split="test")] == ROWS[1:]
    with pytest.raises(UserError, match="has no split 'dev'; it has test, train"):
        pin(DataSource(path=str(tmp_path / "dict"), split="dev"))


def test_folder_gives_the_files_of_the_split_or_all_files_without_split_names(tmp_path: Path) -> None:
    for name in ("train-00", "train-01", "test"):
        write(tmp_path / f"{name}.jsonl", ROWS)
    (tmp_path / "LICENSE").write_text("not data")
    assert {where for where, _ in read(tmp_path)} == {f"train-0{n}.jsonl:{line}" for n in (0, 1) for line in (1, 2)}
    assert {where for where, _ in read(tmp_path, split="test")} == {"test.jsonl:1", "test.jsonl:2"}
    with pytest.raises(UserError, match="has no split 'dev'; it has train, test"):
        pin(DataSource(path=str(tmp_path), split="dev"))
    other = tmp_path / "other"
    other.mkdir()
    write(other / "trainings.jsonl", ROWS)
    write(other / "b.jsonl", ROWS)
    assert {where.split(":")[0] for where, _ in read(other)} == {"trainings.jsonl", "b.jsonl"}


def test_json_lines_under_the_name_json_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [where for where, _ in read(path)] == ["rows.json:1", "rows.json:2"]


def test_byte_order_marks_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        write(tmp_path / name, ROWS)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes() + b"\n\n")
        assert [row for _, row in read(tmp_path / name)] == ROWS


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "is not valid JSON: Expecting ',' delimiter at column 13"),
        (b'["a"]', 'is a list; a row is an object such as {"prompt": …}'),
        (b"null", "is null; a row is an object"),
        (b'"a"', "is a text; a row is an object"),
        (b'{"text": "\xff"}', "is not valid UTF-8: byte 0xff at column 11"),
        (b'{"n": ' + b"1" * 5000 + b"}", "is not usable JSON: Exceeds the limit"),
        (b"[" * 100_000, "is not usable JSON: maximum recursion depth"),
    ],
)
def test_bad_line_is_named_with_its_reason_and_the_next_is_read(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    (bad,) = refused(path)
    assert bad.startswith(f"a.jsonl:2: {reason}")
    assert [where for where, row in read(path) if isinstance(row, dict)] == ["a.jsonl:1", "a.jsonl:3"]


def test_huge_line_is_refused_without_being_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 50)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "a" * 100 + '"}\n{"text": "b"}\n')
    assert refused(path) == ["a.jsonl:1: is longer than 50 bytes"]
    assert len(read(path)) == 2


def test_ragged_lines_of_csv_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\n"a\nb",1\nc\nd,2,3\ne,4\n')
    assert refused(path) == ["a.csv:4: has 1 fields, the header has 2", "a.csv:5: has 3 fields, the header has 2"]
    assert [where for where, row in read(path) if isinstance(row, dict)] == ["a.csv:2", "a.csv:6"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b"a,a\n1,2\n", "header names a column twice"),
        ("a.csv", b'"a\n', "is not valid CSV"),
        ("a.json", b'[{"a": 1},\n}]', r":2:1: is not valid JSON"),
        ("a.json", b'["\xff"]', "is not usable JSON"),
        ("a.parquet", b"", "is not a readable Parquet file"),
        ("a.parquet", b"PAR1 and nothing else PAR1", "is not a readable Parquet file"),
        ("a.arrow", b"", "is not a readable Arrow file"),
    ],
)
def test_broken_file_is_refused_as_a_whole(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read(tmp_path / name)


def test_parquet_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([b"\xff"]).view(pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="not a readable Parquet file: 'utf-8' codec can't decode byte 0xff"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_empty_text_file_has_no_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert read(tmp_path / name) == []


NUMBERED = [{"prompt": str(number), "completion": "x"} for number in range(200)]


def chosen(rows: list[LocatedRow]) -> list[str]:
    return [row["prompt"] for _, row in rows if isinstance(row, dict)]


def test_rows_are_those_with_the_smallest_digests_in_the_order_of_the_file(tmp_path: Path) -> None:
    def digest(row: dict[str, Any]) -> str:
        return hashlib.sha256(json.dumps([0, row], sort_keys=True).encode()).hexdigest()

    rows = read(write(tmp_path / "a.jsonl", NUMBERED), rows=20)
    smallest = sorted(NUMBERED, key=digest)[:20]
    assert chosen(rows) == [row["prompt"] for row in NUMBERED if row in smallest]
    assert [where for where, _ in rows] == [f"a.jsonl:{int(number) + 1}" for number in chosen(rows)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow"])
def test_rows_chosen_do_not_depend_on_the_format_of_the_file(tmp_path: Path, suffix: str) -> None:
    expected = chosen(read(write(tmp_path / "a.jsonl", NUMBERED), rows=20))
    assert chosen(read(write(tmp_path / f"b{suffix}", NUMBERED), rows=20)) == expected


def test_other_rows_replace_few_of_the_chosen_ones(tmp_path: Path) -> None:
    before = chosen(read(write(tmp_path / "a.jsonl", NUMBERED), rows=50))
    assert set(chosen(read(write(tmp_path / "a.jsonl", NUMBERED), rows=20))) < set(before)
    more = [{"prompt": f"new {number}", "completion": "x"} for number in range(20)]
    after = chosen(read(write(tmp_path / "b.jsonl", [*more, *NUMBERED]), rows=50))
    assert set(after) - set(before) == {prompt for prompt in after if prompt.startswith("new")}
    assert len(set(before) - set(after)) < 15  # 50 · 20/220 = 4.5 are expected
    assert chosen(list(pin(DataSource(path=str(tmp_path / "a.jsonl"), rows=50)).read(0, 1, KIND))) != before


def test_rows_at_the_end_of_a_sorted_file_are_chosen_too(tmp_path: Path) -> None:
    kinds_of_rows = [{"prompt": f"{number}", "completion": "ab"[number >= 100]} for number in range(200)]
    rows = read(write(tmp_path / "a.jsonl", kinds_of_rows), rows=100)
    of_the_first_kind = sum(row["completion"] == "a" for _, row in rows if isinstance(row, dict))
    assert 32 <= of_the_first_kind <= 68  # 5 standard deviations of a hypergeometric draw, 3.5 rows, around 50


def test_of_equal_rows_the_first_are_chosen_and_malformed_rows_count(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.jsonl", [ROWS[0]] * 10), rows=3)
    assert [where for where, _ in rows] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    (tmp_path / "b.jsonl").write_text("no JSON\n" * 3)
    assert len(read(tmp_path / "b.jsonl", rows=2)) == 2
    assert read(write(tmp_path / "c.jsonl", ROWS), rows=5) == read(tmp_path / "c.jsonl")


def test_values_that_json_cannot_hold_do_not_decide_the_chosen_rows(tmp_path: Path) -> None:
    table = pa.table(
        {"prompt": [str(number) for number in range(40)], "picture": [bytes([number]) for number in range(40)]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.set_column(1, "picture", pa.array([b""] * 40)), tmp_path / "b.parquet")
    assert chosen(read(tmp_path / "a.parquet", rows=9)) == chosen(read(tmp_path / "b.parquet", rows=9))


def test_rows_too_deep_for_a_digest_are_still_refused_by_their_line(tmp_path: Path) -> None:
    deep = {"prompt": "a", "completion": "b", "more": "[" * 900 + "]" * 900}
    text = json.dumps(deep).replace('"[', "[").replace(']"', "]")
    (tmp_path / "a.jsonl").write_text(f"{text}\n" * 3)
    assert read(tmp_path / "a.jsonl", rows=2) == [
        ("a.jsonl:1", "is nested too deeply"),
        ("a.jsonl:2", "is nested too deeply"),
    ]


def test_choosing_rows_holds_few_in_memory(tmp_path: Path) -> None:
    large = ({"prompt": f"{number}" + "x" * 100_000} for number in range(600))
    rows = ((f"a:{number}", row) for number, row in enumerate(large))
    tracemalloc.start()
    count = sum(1 for _ in sample_rows(rows, 500, 0, tmp_path))
    assert count == 500
    assert tracemalloc.get_traced_memory()[1] < 5 * 2**20  # 50 MiB are chosen
    tracemalloc.stop()


def test_pin_does_not_depend_on_the_place_and_does_on_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = (pin(DataSource(path=str(write(at / "a.jsonl", ROWS)))) for at in (tmp_path, tmp_path / "b"))
    assert first.content() == second.content()
    assert str(tmp_path) not in json.dumps(first.content())
    third = pin(DataSource(path=str(write(tmp_path / "a.jsonl", ROWS[:1]))))
    assert third.content() != first.content()


@pytest.mark.parametrize("change", [{"format": "messages"}, {"rows": 1}, {"weight": 2.0}, {"columns": {"prompt": "q"}}])
def test_pin_content_changes_with_every_effective_setting(tmp_path: Path, change: dict[str, Any]) -> None:
    path = str(write(tmp_path / "a.jsonl", ROWS))
    assert pin(DataSource(path=path)).content() != pin(DataSource(path=path, **change)).content()


def test_file_that_changes_after_pinning_is_refused(tmp_path: Path) -> None:
    pinned = pin(DataSource(path=str(write(tmp_path / "a.jsonl", ROWS))))
    write(tmp_path / "a.jsonl", ROWS[::-1])  # as long as before
    with pytest.raises(DataError, match="has changed since this run started"):
        list(pinned.read(0, 0, kinds.load("demonstrations")))


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("trian.jsonl", r"no such file or folder; did you mean .*train\.jsonl\?"),
        ("absent/folder/train.jsonl", "the folder .*absent/folder does not exist either"),
        (
            "notes.md",
            r"rows are read from \.jsonl, \.ndjson, \.json, \.csv, \.parquet, \.arrow, \.txt files, not from 'notes.md'",
        ),
        ("empty", "there is no .* file in this folder"),
    ],
)
def test_path_that_holds_no_rows_gets_a_sentence(tmp_path: Path, path: str, sentence: str) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "notes.md").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=sentence):
        pin(DataSource(path=str(tmp_path / path)))


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Hub cache that holds one data set, as an earlier download would have left it; returns its commit."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "hub" / "datasets--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    write(folder / "snapshots" / commit / "train.jsonl", ROWS)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    return commit


def test_hub_name_is_pinned_and_read_from_the_local_cache_when_offline(offline_hub: str) -> None:
    pinned = pin(DataSource(path="org/name"))
    assert pinned.hub_commit == offline_hub
    assert pinned.content()["hub"] == f"org/name@{offline_hub}"
    rows = list(pinned.read(0, 0, kinds.load("demonstrations")))
    assert rows == [
        ("org/name:1", ROWS[0]),
        ("org/name:2", ROWS[1]),
    ]


def test_images_of_a_hub_data_set_stay_encoded(offline_hub: str, tmp_path: Path) -> None:
    """In columns and at any depth: decoded pictures would have other bytes."""
    import datasets

    (snapshot,) = (tmp_path / "hub").glob("*/snapshots/*")
    (snapshot / "train.jsonl").unlink()
    image = {"bytes": b"any bytes", "path": "a.png"}
    part = {"type": datasets.Value("string"), "image": datasets.Image()}
    features = datasets.Features(
        {"image": datasets.Image(), "messages": datasets.List({"content": datasets.List(part)})}
    )
    row = {
        "image": image,
        "messages": [{"content": [{"type": "image", "image": image}, {"type": "text", "image": None}]}],
    }
    datasets.Dataset.from_list([row], features=features).to_parquet(snapshot / "train.parquet")
    ((where, read),) = pin(DataSource(path="org/name")).read(0, 0, kinds.load("demonstrations"))
    assert (where, read) == ("org/name:1", row)
    assert isinstance(read, ArrowRow)


def test_hub_name_that_is_not_cached_gets_a_sentence_when_offline(offline_hub: str) -> None:
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the local Hub cache holds no revision 'main'"):
        pin(DataSource(path="org/other"))


def test_hub_that_does_not_answer_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k.d").mkdir()
    with pytest.raises(UserError) as caught:
        pin(DataSource(path="gsm8k"))
    message = str(caught.value)
    assert message.startswith(
        "gsm8k: no such file or folder; did you mean gsm8k.d? (relative paths are relative to the recipe's file"
    )
    assert "), and the Hub could not be reached to look for a dataset of this name" in message
    assert "set HF_HUB_OFFLINE=1" in str(caught.value)


def test_split_that_a_hub_data_set_lacks_gets_a_sentence(offline_hub: str) -> None:
    with pytest.raises(UserError, match="cannot load split 'dev'"):
        list(pin(DataSource(path="org/name", split="dev")).read(0, 0, kinds.load("demonstrations")))


def test_commit_needs_no_question_to_the_hub() -> None:
    assert pin(DataSource(path="org/name", revision="a" * 40)) == PinnedSource(
        source=DataSource(path="org/name", revision="a" * 40), hub_commit="a" * 40
    )


def test_flow_process_stays_light() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'}"
    modules = ("pin", "tasks", "formats", "template", "limits", "mixing", "tables", "statistics", "build")
    imports = "; ".join(f"import alignment_core.data.{module}" for module in modules)
    imports += "; from alignment_core.recipes.row_plugins import formats; formats()"
    code = f"import sys; {imports}; import alignment_core.models.tokenizer; sys.exit(str({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


@pytest.mark.parametrize("field", ["subset", "revision"])
def test_fields_for_hub_data_sets_are_refused_for_a_file(jsonl: Any, field: str) -> None:
    path = jsonl([{"text": "a"}])
    with pytest.raises(UserError, match=rf"train.jsonl: `{field}` applies only to Hub data sets, but this is a file"):
        pin(DataSource.model_validate({"path": str(path), field: "main"}))
