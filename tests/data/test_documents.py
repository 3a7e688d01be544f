"""Documents: long ones become blocks in which every token is a target once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.build import build
from alignment_core.data.kinds.documents import PROBLEMS, blocks
from alignment_core.data.pin import pin
from alignment_core.data.statistics import account, losses
from alignment_core.data.tasks import split_of
from alignment_core.errors import DataError, UserError
from alignment_core.recipes.paths import may_be_hub_name
from alignment_core.recipes.sections.data import DataConfig, DataSource
from tests.data.conftest import Build, Write
from tests.data.test_data_template import with_bos

EOS, BOS = 257, 261
"""Ids of the byte tokenizer; letters are their own."""
DATA = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"


def documents(path: Any, tokenizer: Any, overlap: int = 0, **fields: Any) -> Any:
    config = DataConfig.model_validate({"sources": [str(path)], "shuffle": False, **fields})
    pinned = [pin(source) for source in config.sources]
    return build(config, pinned, tokenizer, "documents", 0, settings={"block_overlap": overlap})


def rows(data: Any) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"], row["loss_mask"]) for row in data.train.to_pylist()]


def test_a_long_document_is_cut_and_each_token_but_the_first_is_a_target_once(tokenizer: Any, jsonl: Write) -> None:
    # abcdefg and EOS are 8 tokens, of which a cannot be predicted: with at most 4 tokens a block has 3 targets,
    # and begins with the last token of the block before
    data = documents(jsonl([{"text": "abcdefg"}]), tokenizer, max_length=4)
    assert rows(data) == [
        ([97, 98, 99, 100], [0, 1, 1, 1]),
        ([100, 101, 102, 103], [0, 1, 1, 1]),
        ([103, EOS], [0, 1]),
    ]
    assert data.train["text"].to_pylist() == ["abcd", "defg", "g<eos>"]
    assert data.statistics["tokens"]["targets"] == 7


def test_a_block_begins_with_bos_where_the_tokenizer_has_one_and_so_every_token_is_a_target(jsonl: Write) -> None:
    data = documents(jsonl([{"text": "abcdefg"}, {"text": "<unused0>ab"}]), with_bos(None), max_length=4)
    assert rows(data) == [
        ([BOS, 97, 98, 99], [0, 1, 1, 1]),
        ([BOS, 100, 101, 102], [0, 1, 1, 1]),
        ([BOS, 103, EOS], [0, 1, 1]),
        ([BOS, 97, 98, EOS], [0, 1, 1, 1]),  # not twice
    ]


def test_overlap_gives_context_that_is_no_target_again(tokenizer: Any, jsonl: Write) -> None:
    path = jsonl([{"text": "abcdefg"}])
    assert rows(documents(path, tokenizer, overlap=2, max_length=5)) == [
        ([97, 98, 99, 100, 101], [0, 1, 1, 1, 1]),
        ([100, 101, 102, 103, EOS], [0, 0, 1, 1, 1]),
    ]
    assert rows(documents(path, with_bos(None), overlap=2, max_length=6)) == [
        ([BOS, 97, 98, 99, 100, 101], [0, 1, 1, 1, 1, 1]),
        ([BOS, 100, 101, 102, 103, EOS], [0, 0, 0, 1, 1, 1]),
    ]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("overlap", [1, 3])
@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 50])
def test_blocks_hold_every_target_once_within_the_token_limit(tokens: int, overlap: int, first: int) -> None:
    cuts = list(blocks(tokens, 8, overlap, first))
    assert [token for _, start, end in cuts for token in range(start, end)] == list(range(first, tokens))
    assert all(end - begin <= 8 for begin, _, end in cuts)
    assert all(start - begin == overlap for begin, start, _ in cuts[1:])


def test_a_document_that_fits_is_one_row_with_its_own_text(tokenizer: Any, jsonl: Write) -> None:
    data = documents(jsonl([{"text": "grüß"}]), tokenizer, max_length=7)
    assert data.train["text"].to_pylist() == ["grüß<eos>"]
    assert data.statistics["rows"]["split"] == 0


def test_blocks_name_the_line_of_their_document_and_split_documents_are_counted(tokenizer: Any, jsonl: Write) -> None:
    path = jsonl([{"text": "ab"}, {"text": " \n"}, {"text": "abcdefg"}, {"text": ""}])
    data = documents(path, tokenizer, max_length=4)
    assert data.train["source"].to_pylist() == ["train.jsonl:1"] + ["train.jsonl:3"] * 3
    assert account(data.statistics) == "4 made of 4, 1 of them split: 2 empty_document"
    (warning,) = losses(data.statistics, "first_exhausted")
    assert "2 have no text (empty_document)" in warning


def test_all_blocks_of_a_document_and_its_copies_are_held_out_together(tokenizer: Any, jsonl: Write) -> None:
    texts = [f"document {number} " * 5 for number in range(40)]
    path = jsonl([{"text": text} for text in [*texts, *texts]])
    data = documents(path, tokenizer, max_length=32, test_rows=10)
    names = {half: set(getattr(data, half)["source"].to_pylist()) for half in ("train", "test")}
    test_documents = {int(name.partition(":")[2]) for name in names["test"]}
    assert data.test.num_rows == sum(-(-len(texts[line - 1]) // 31) for line in test_documents)
    assert not {(line + 39) % 80 + 1 for line in test_documents} & test_documents, "of copies one is held out"
    trained = {int(name.partition(":")[2]) for name in names["train"]}
    assert not {line % 40 for line in trained} & {line % 40 for line in test_documents}
    assert data.statistics["dropped"] == {"duplicate_of_test": data.test.num_rows}


def test_a_document_cannot_be_in_both_splits(tokenizer: Any, jsonl: Write) -> None:
    with pytest.raises(
        DataError, match="rows that share a document go to the same split, and all 3 rows are in one group"
    ):
        documents(jsonl([{"text": "abcdefg"}]), tokenizer, max_length=4, test_rows=2)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"content": "a"}, "cannot read documents from these columns: looked for `text`; the first row has content"),
        ({"text": ["a"]}, r"train\.jsonl:1: `text` is a list of 1; text is needed"),
        ({"text": " "}, r"no rows left of 1 row read from train\.jsonl: 1 have no text \(empty_document\)"),
    ],
)
def test_rows_that_are_no_documents_get_a_sentence(
    tokenizer: Any, jsonl: Write, row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        documents(jsonl([row]), tokenizer)


def test_a_text_file_is_a_document_and_so_is_each_of_a_folder(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes("\ufeffone\r\ntwo".encode())
    (tmp_path / "a.txt").write_text("three")
    data = documents(tmp_path, tokenizer)
    assert data.train["text"].to_pylist() == ["three<eos>", "one\r\ntwo<eos>"]
    assert data.train["source"].to_pylist() == ["a.txt:1", "b.txt:1"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "four"}))
    assert documents(tmp_path, tokenizer).train["text"].to_pylist() == ["four<eos>"], "a text beside rows is a README"
    assert documents(tmp_path / "b.txt", tokenizer).train.num_rows == 1
    assert not may_be_hub_name("corpus.txt")


def test_a_text_file_that_is_no_utf8_is_named_with_its_place(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\nt\xffo")
    with pytest.raises(DataError, match=r"a\.txt:2: is not valid UTF-8: byte 0xff at column 2"):
        documents(tmp_path / "a.txt", tokenizer)


def test_built_in_tasks_give_documents_of_several_problems_of_one_split(built: Build) -> None:
    data = built({"sources": [{"task": "first", "rows": 30, "split": "test"}], "max_length": 512}, "documents")
    for text in data.train["text"].to_pylist():
        lines = text.removesuffix("<eos>").split("\n")
        assert len(lines) == 2 * PROBLEMS
        assert all(answer == question[7] * 4 for question, answer in zip(lines[::2], lines[1::2], strict=True))
        assert {split_of(f"{question}\n") for question in lines[::2]} == {"test"}


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data (GSM8K, HH-RLHF, MT-Bench) is not here")
def test_real_texts_lose_no_token(tokenizer: Any) -> None:
    source = {"path": str(DATA / "hh-rlhf-harmless" / "test.jsonl"), "columns": {"text": "chosen"}}
    data = documents("", tokenizer, sources=[source], max_length=256, test_rows=60)
    texts = [json.loads(line)["chosen"] for line in (DATA / "hh-rlhf-harmless" / "test.jsonl").open()]
    tables = [*data.train.to_pylist(), *data.test.to_pylist()]
    assert sum(sum(row["loss_mask"]) for row in tables) == sum(len(text.encode()) for text in dict.fromkeys(texts))
    assert max(len(row["input_ids"]) for row in tables) == 256
    sources = [set(table["source"].to_pylist()) for table in (data.train, data.test)]
    assert not sources[0] & sources[1]


def test_texts_are_documents_of_no_other_kind_of_row(built: Build, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(DataError, match="the first row has text"):
        built({"sources": [{"path": str(tmp_path / "a.txt")}]}, "preferences")
    assert pin(DataSource(path=str(tmp_path / "a.txt"))).content()["files"][0]["name"] == "a.txt"
