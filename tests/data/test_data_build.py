"""From recipe to tables: schemas, filters, hold-out, refusals, determinism, statistics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from alignment_core.data.build import BuiltDataset, build, write
from alignment_core.data.pin import pin
from alignment_core.data.statistics import account, losses
from alignment_core.errors import DataError, UserError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig
from tests.data.chat_templates import FORGETS_THOUGHTS, REFUSES_SYSTEM

Write = Callable[..., Path]
Build = Callable[..., BuiltDataset]

PAIRS = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(40)]
IDS, MASK = pa.list_(pa.int32()), pa.list_(pa.int8())


def column(data: BuiltDataset, name: str, table: str = "train") -> list[Any]:
    values: list[Any] = getattr(data, table)[name].to_pylist()
    return values


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("demonstrations", {"input_ids": IDS, "loss_mask": MASK, "text": pa.string(), "source": pa.string()}),
        (
            "preferences",
            {
                "prompt_ids": IDS,
                "chosen_ids": IDS,
                "rejected_ids": IDS,
                "margin": pa.float32(),
                "prompt": pa.string(),
                "chosen": pa.string(),
                "rejected": pa.string(),
                "source": pa.string(),
            },
        ),
        (
            "prompts",
            {
                "prompt_ids": IDS,
                "prompt": pa.string(),
                "label": pa.string(),
                "task": pa.string(),
                "messages": pa.string(),
                "tools": pa.string(),
                "columns": pa.string(),
                "source": pa.string(),
            },
        ),
    ],
)
def test_tables_have_exactly_these_columns(built: Build, kind: str, columns: dict[str, Any]) -> None:
    data = built({"task": "mixed", "rows": 10}, kind)
    assert {field.name: field.type for field in data.train.schema} == columns
    assert data.train.schema == data.test.schema
    assert (data.train.num_rows, data.test.num_rows) == (10, 0)


def test_rows_carry_label_task_and_source(built: Build, jsonl: Write) -> None:
    prompts = built({"task": "reverse", "rows": 5, "shuffle": False}, "prompts")
    assert column(prompts, "task") == ["reverse"] * 5
    assert column(prompts, "source")[0] == "task:reverse/train:1"
    own = built(jsonl([{"prompt": "a", "task": "theirs"}]), "prompts")
    assert (column(own, "task"), column(own, "label"), column(own, "source")) == ([None], [None], ["train.jsonl:1"])


def test_margin_is_null_where_none_is_given(built: Build, jsonl: Write) -> None:
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b", **extra} for extra in ({}, {"margin": 0.5})]
    assert column(built(jsonl(pairs), "preferences", shuffle=False), "margin") == [None, 0.5]


def test_equal_seeds_give_equal_files_byte_for_byte(built: Build, tmp_path: Path) -> None:
    recipe = {"sources": [{"task": "sort", "weight": 1}, {"task": "max", "weight": 2}], "test_rows": 20}

    def files(name: str, seed: int) -> dict[str, bytes]:
        write(built(recipe, "preferences", seed=seed), tmp_path / name)
        return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

    first = files("a", 1)
    assert set(first) == {"train.parquet", "test.parquet", "statistics.json", "prompts.sha256"}
    assert files("b", 1) == first
    assert files("c", 2)["train.parquet"] != first["train.parquet"]


def test_written_folder_is_a_data_set_for_datasets(built: Build, jsonl: Write, tmp_path: Path) -> None:
    import datasets

    for test_rows in (0, 10):
        folder = tmp_path / f"out{test_rows}"
        write(built(jsonl(PAIRS), "demonstrations", test_rows=test_rows), folder)
        loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
        assert {name: len(split) for name, split in loaded.items()} == (
            {"train": 30, "test": 10} if test_rows else {"train": 40}
        )
        assert loaded["train"].column_names == ["input_ids", "loss_mask", "text", "source"]


def test_test_set_has_the_requested_size_and_no_training_row(built: Build, jsonl: Write) -> None:
    data = built(jsonl(PAIRS), "demonstrations", test_rows=7)
    train, test = set(column(data, "text")), set(column(data, "text", "test"))
    assert (len(train), len(test), len(train & test)) == (33, 7, 0)


def test_membership_of_the_test_set_does_not_depend_on_seed_order_or_template(built: Build, jsonl: Write) -> None:
    def test_rows(rows: list[Any], **options: Any) -> set[str]:
        data = built(jsonl(rows), "demonstrations", test_rows=7, **options)
        return {text.split("<assistant>")[1].split("<")[0] for text in column(data, "text", "test")}

    first = test_rows(PAIRS)
    assert test_rows(PAIRS, seed=9) == test_rows(PAIRS[::-1]) == test_rows(PAIRS, chat_template=REFUSES_SYSTEM) == first
    more = [*PAIRS, {"prompt": "new", "completion": "new"}]
    assert len(test_rows(more) - first) <= 1  # at most the new row itself comes in


def prompts(data: BuiltDataset, table: str = "train") -> set[str]:
    return set(column(data, "prompt", table))


def test_no_prompt_is_in_both_splits(built: Build, jsonl: Write) -> None:
    pairs = [{"prompt": f"p{i % 30}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(120)]
    data = built(jsonl(pairs), "preferences", test_rows=20)
    assert (data.train.num_rows, data.test.num_rows) == (100, 20)  # five prompts of four pairs each
    assert not prompts(data) & prompts(data, "test")


def test_equal_prompts_are_recognised_across_sources_and_formats(built: Build, jsonl: Write) -> None:
    texts = [{"prompt": f"p{i}", "completion": f"a{i}"} for i in range(20)]
    chats = [
        {"messages": [{"role": "user", "content": f" p{i}\n"}, {"role": "assistant", "content": f"b{i}"}]}
        for i in range(20)
    ]
    data = built(
        {"sources": [str(jsonl(texts, "a.jsonl")), str(jsonl(chats, "b.jsonl"))]}, "demonstrations", test_rows=8
    )
    answers = {
        table: {text.split("<assistant>")[1][1:] for text in column(data, "text", table)} for table in ("train", "test")
    }
    assert (data.test.num_rows, len(answers["test"])) == (8, 4)
    assert not answers["train"] & answers["test"]


def test_a_conversation_with_one_trained_answer_is_held_out_by_the_messages_before(built: Build, jsonl: Write) -> None:
    def chat(number: int, end: str) -> dict[str, Any]:
        turns = [("user", "hi"), ("assistant", "yes?"), ("user", f"q{number}"), ("assistant", end)]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    rows = [chat(i, end) for i in range(10) for end in ("a", "b")]
    data = built(jsonl(rows), "demonstrations", test_rows=6, assistant_turns="last")
    questions = {
        table: {text.split("<user>")[2].split("<")[0] for text in column(data, "text", table)}
        for table in ("train", "test")
    }
    assert (data.test.num_rows, len(questions["test"])) == (6, 3)
    assert not questions["train"] & questions["test"]


def test_the_size_of_the_test_set_is_the_nearest_that_whole_prompts_allow(built: Build, jsonl: Write) -> None:
    rows = [{"prompt": f"p{i}", "completion": f"{i}.{j}"} for i in range(10) for j in range(4)]
    assert [built(jsonl(rows), "demonstrations", test_rows=count).test.num_rows for count in (6, 7, 9, 10, 12)] == [
        8,
        8,
        8,
        12,
        12,
    ]
    common = [{"prompt": "hello", "completion": str(i)} for i in range(500)]  # larger than any requested test set
    data = built(jsonl([*common, *rows]), "demonstrations", test_rows=8)
    assert data.test.num_rows == 8
    assert not any("hello" in text for text in column(data, "text", "test"))
    with pytest.raises(
        DataError,
        match=r"test_rows: cannot hold out 8 of 500 usable rows: .* share a prompt .* all 500 rows are in one group$",
    ):
        built(jsonl(common), "demonstrations", test_rows=8)


def test_copies_of_a_row_are_never_in_both_splits(built: Build, jsonl: Write) -> None:
    data = built(jsonl(PAIRS * 3), "demonstrations", test_rows=7)
    train, test = Counter(column(data, "text")), Counter(column(data, "text", "test"))
    assert not train & test
    assert set(test.values()) == {1}
    assert data.statistics["dropped"] == {"duplicate_of_test": 14}
    assert len(column(data, "text")) == 120 - 21


def test_rows_of_a_conversation_stay_in_the_same_split(built: Build, jsonl: Write) -> None:
    def chat(name: str) -> dict[str, Any]:
        turns = [
            ("user", f"a{name}"),
            ("assistant", f"<think>{name}</think>b"),
            ("user", "c"),
            ("assistant", f"d{name}"),
        ]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    data = built(
        jsonl([chat(f"n{i}") for i in range(10)]), "demonstrations", chat_template=FORGETS_THOUGHTS, test_rows=3
    )
    assert data.statistics["rows"] == {"read": 10, "split": 10, "kept": 20, "train": 16, "test": 4, "unused": 0}
    assert not set(column(data, "source")) & set(column(data, "source", "test"))


def test_holding_out_everything_is_refused(built: Build, jsonl: Write) -> None:
    with pytest.raises(DataError, match="test_rows: cannot hold out 40 of 40 usable rows"):
        built(jsonl(PAIRS), "demonstrations", test_rows=40)


LONG = [{"prompt": "p" * 10, "completion": "c" * 4}, {"prompt": "p" * 3, "completion": "c" * 20}, *PAIRS[:2]]
# With <user>, <assistant> and <eos> these are 12+5, 5+21 and twice 4+3 tokens.


def test_overlong_rows_are_dropped_and_counted(built: Build, jsonl: Write) -> None:
    data = built(jsonl(LONG), "demonstrations", max_length=16)
    assert data.statistics["rows"]["kept"] == 2
    assert data.statistics["dropped"] == {"too_long": 2}
    assert built(jsonl(LONG), "demonstrations", max_prompt_length=10).statistics["dropped"] == {"prompt_too_long": 1}


def test_overlong_prompts_are_cut_from_the_left_and_completions_from_the_right(built: Build, jsonl: Write) -> None:
    data = built(jsonl(LONG), "demonstrations", max_length=16, overlong="truncate", shuffle=False)
    texts = column(data, "text")
    assert texts[0] == "p" * 10 + "<assistant>cccc<eos>"  # one token over: <user> falls
    assert texts[1] == "<user>ppp<assistant>" + "c" * 11
    assert [sum(mask) for mask in column(data, "loss_mask")] == [5, 11, 3, 3]
    assert max(map(len, column(data, "input_ids"))) == 16


def test_pairs_share_the_truncated_prompt_and_equal_answers_after_truncation_are_dropped(
    built: Build, jsonl: Write
) -> None:
    rows = [
        {"prompt": "p", "chosen": "same start A", "rejected": "same start B"},
        {"prompt": "p", "chosen": "A differs early", "rejected": "B"},
    ]
    data = built(jsonl(rows), "preferences", max_length=8, overlong="truncate")
    assert data.statistics["dropped"] == {"identical_after_truncation": 1}
    assert (column(data, "chosen"), column(data, "rejected")) == (["A dif"], ["B"])
    assert column(data, "rejected_ids") == [[ord("B"), 257]]


def test_long_prompts_lose_their_beginning(built: Build, jsonl: Write) -> None:
    data = built(jsonl([{"prompt": "abcdef"}]), "prompts", max_prompt_length=4, overlong="truncate")
    assert column(data, "prompt") == ["def<assistant>"]
    with pytest.raises(DataError, match=r"no rows left of 1 row read .* 1 have a prompt longer than max_prompt_length"):
        built(jsonl([{"prompt": "abcdef"}]), "prompts", max_prompt_length=4)


def test_pairs_without_a_difference_and_answers_without_text_are_dropped(built: Build, jsonl: Write) -> None:
    rows = [("a", "a"), ("a", " \n"), ("", "b"), ("a", "b")]
    data = built(jsonl([{"prompt": "p", "chosen": c, "rejected": r} for c, r in rows]), "preferences")
    assert data.statistics["dropped"] == {"empty_completion": 2, "identical_pair": 1}
    sft = built(jsonl([{"prompt": "p", "completion": c} for c in ("", "a")]), "demonstrations")
    assert sft.statistics["dropped"] == {"empty_completion": 1}


def test_malformed_rows_are_refused_by_file_line_and_reason(built: Build, jsonl: Write) -> None:
    path = jsonl([PAIRS[0], "{broken\n", {"prompt": None, "completion": "x"}, {"prompt": "x"}])
    with pytest.raises(DataError) as caught:
        built(path, "demonstrations")
    assert str(caught.value).splitlines() == [
        "3 of 4 rows are malformed (max_bad_rows allows 0.0%):",
        "  train.jsonl:2: is not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "  train.jsonl:3: `prompt` is null; text or a list of messages is needed",
        "  train.jsonl:4: there is no `completion`; the row has prompt",
    ]


def test_only_the_first_few_malformed_rows_are_listed(built: Build, jsonl: Write) -> None:
    path = jsonl([*PAIRS, *(["{\n"] * 30)])
    with pytest.raises(DataError, match="at least 5 rows are malformed"):
        built(path, "demonstrations")
    with pytest.raises(DataError, match=r"30 of 70 rows are malformed \(max_bad_rows allows 10.0%\)[^…]*… and 25 more"):
        built(path, "demonstrations", max_bad_rows=0.1)


@pytest.mark.parametrize(("kind", "rows"), [("preferences", 2), ("unpaired", 4), ("demonstrations", 2), ("prompts", 2)])
@pytest.mark.parametrize("form", ["hh", "messages"])
def test_pairs_of_conversations_without_a_common_prompt_are_dropped_and_counted(
    built: Build, jsonl: Write, kind: str, rows: int, form: str
) -> None:
    """As some rows of Anthropic/hh-rlhf; the others stay."""
    speakers = {"Human": "user", "Assistant": "assistant"}

    def conversation(*texts: str) -> Any:
        turns = list(zip(["Human", "Assistant"] * len(texts), texts, strict=False))
        if form == "hh":
            return "".join(f"\n\n{speaker}: {text}" for speaker, text in turns)
        return [{"role": speakers[speaker], "content": text} for speaker, text in turns]

    good = [
        {"chosen": conversation(f"q{i}", "a", "b", "c"), "rejected": conversation(f"q{i}", "a", "b", "d")}
        for i in range(2)
    ]
    bad = [
        {"chosen": conversation("q", "a", "b", "c"), "rejected": conversation("q", "x", "b", "d")},
        {"chosen": conversation("q", "a", "b", "c"), "rejected": conversation("q", "d")},
    ]
    data = built(jsonl([good[0], *bad, good[1]]), kind)
    assert (data.train.num_rows, data.statistics["dropped"]) == (rows, {"different_prompts": 2})
    (warning,) = losses(data.statistics, "first_exhausted")
    assert "2 have chosen and rejected conversations that differ before their last message" in warning
    with pytest.raises(DataError, match=r"no rows left of 2 rows read .*: 2 have chosen .* \(different_prompts\)"):
        built(jsonl(bad), kind)


def test_malformed_rows_up_to_the_allowed_share_are_skipped_and_counted(built: Build, jsonl: Write) -> None:
    path = jsonl([*PAIRS[:9], "{\n"])
    assert built(path, "demonstrations", max_bad_rows=0.1).statistics["dropped"] == {"malformed": 1}
    with pytest.raises(DataError, match="1 of 10 rows is malformed"):
        built(path, "demonstrations", max_bad_rows=0.09)


def test_conversation_that_the_template_refuses_is_a_malformed_row(built: Build, jsonl: Write) -> None:
    path = jsonl([{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}])
    with pytest.raises(DataError, match=r"train.jsonl:1: the chat template refuses .*no system messages here"):
        built(path, "prompts", chat_template=REFUSES_SYSTEM)


def test_bytes_that_are_no_utf8_in_csv_are_named(built: Build, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,completion\na,\xff\n")
    with pytest.raises(DataError, match=r"a.csv:2: `completion` is not valid Unicode"):
        built(tmp_path / "a.csv", "demonstrations")


def test_parquet_with_a_column_of_the_wrong_type_is_named(built: Build, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": [1, 2], "completion": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet:1: `prompt` is the number 1"):
        built(tmp_path / "a.parquet", "demonstrations")


def test_unknown_columns_name_the_first_row(built: Build, jsonl: Write) -> None:
    with pytest.raises(DataError, match=r"train.jsonl:1: cannot read demonstrations .* the first row has q, a"):
        built(jsonl([{"q": "a", "a": "b"}]), "demonstrations")


def test_format_that_cannot_serve_the_kind_is_refused(built: Build, jsonl: Write) -> None:
    source = {"path": str(jsonl([{"text": "a"}])), "format": "text"}
    with pytest.raises(UserError, match=r"train.jsonl: format 'text' does not provide preference pairs"):
        built({"sources": [source]}, "preferences")


def test_messages_without_any_template_are_refused(built: Build, jsonl: Write, plain_tokenizer: Any) -> None:
    path = jsonl([{"prompt": [{"role": "user", "content": "u"}]}])
    with pytest.raises(UserError, match="set `chat_template`"):
        built(path, "prompts", tokenizer=plain_tokenizer)


def test_error_without_rows_left_counts_rows_read_and_dropped_by_reason(built: Build, jsonl: Write) -> None:
    with pytest.raises(DataError) as caught:
        built(jsonl([*PAIRS[:3], {"prompt": "p", "completion": ""}]), "demonstrations", max_length=5)
    assert str(caught.value) == (
        "no rows left of 4 rows read from train.jsonl: 1 have an answer without text (empty_completion); "
        "3 are longer than max_length (too_long)"
    )


def test_empty_file_has_no_rows_left(built: Build, jsonl: Write) -> None:
    with pytest.raises(DataError, match=r"no rows left of 0 rows read from train.jsonl"):
        built(jsonl([]), "demonstrations")


def test_source_of_a_mixture_that_has_nothing_left_is_refused(built: Build, jsonl: Write) -> None:
    sources = [{"task": "max", "weight": 1}, {"path": str(jsonl([])), "weight": 1}]
    with pytest.raises(DataError, match=r"no rows left of 0 rows read from train.jsonl"):
        built({"sources": sources}, "demonstrations")


def test_statistics_add_up(built: Build, jsonl: Write) -> None:
    sources = [{"path": str(jsonl([*PAIRS, {"prompt": "p", "completion": ""}]))}, {"task": "first", "rows": 10}]
    data = built({"sources": sources, "test_rows": 5}, "demonstrations")
    statistics = data.statistics
    assert statistics["rows"] == {"read": 51, "split": 0, "kept": 50, "train": 45, "test": 5, "unused": 0}
    assert [source["name"] for source in statistics["sources"]] == ["train.jsonl", "task:first/train"]
    for name, count in statistics["rows"].items():
        assert sum(source[name] for source in statistics["sources"]) == count
    assert statistics["sources"][0]["dropped"] == statistics["dropped"] == {"empty_completion": 1}
    lengths, targets = [len(ids) for ids in column(data, "input_ids")], sum(map(sum, column(data, "loss_mask")))
    tokens = statistics["tokens"]
    assert (tokens["total"], tokens["targets"]) == (sum(lengths), targets)
    assert tokens["target_share"] == pytest.approx(targets / sum(lengths), abs=1e-6)
    assert json.loads(json.dumps(statistics)) == statistics


def test_dropped_rows_are_reported_with_the_reason(built: Build, jsonl: Write) -> None:
    long = [{"prompt": f"l{i}", "completion": "c" * 50} for i in range(6)]
    data = built(
        jsonl([*PAIRS, *long, {"prompt": "e", "completion": " "}]), "demonstrations", max_length=20, test_rows=5
    )
    assert account(data.statistics) == "35 of 47: 1 empty_completion, 6 too_long, 5 test"
    assert losses(data.statistics, "first_exhausted") == [
        "train.jsonl: 7 of 47 rows (15%) are left out: 1 have an answer without text (empty_completion); 6 are longer than "
        "max_length (too_long)"
    ]
    few = built(jsonl([*PAIRS, *PAIRS, {"prompt": "e", "completion": " "}]), "demonstrations")
    assert account(few.statistics) == "80 of 81: 1 empty_completion"
    assert losses(few.statistics, "first_exhausted") == []


CUT = {"overlong": "truncate"}


def test_shortened_rows_are_reported(built: Build, jsonl: Write) -> None:
    long = [{"prompt": "p", "completion": "c" * 50}, {"prompt": "p" * 50, "completion": "c"}]
    data = built(jsonl([*PAIRS[:8], *long]), "demonstrations", max_length=20, overlong="truncate")
    assert (data.statistics["shortened"], data.statistics["sources"][0]["shortened"]) == (2, 2)
    assert account(data.statistics) == "10 of 10: 2 shortened"
    (sentence,) = losses(data.statistics, "first_exhausted")
    assert sentence.startswith("train.jsonl: 2 of 10 rows (20%) are shortened to max_length or max_prompt_length")
    pairs = [{"prompt": "p" * 9, "chosen": "yes", "rejected": "no"}, {"prompt": "p", "chosen": "y", "rejected": "n"}]
    for kind in ("preferences", "prompts"):
        cut = built(jsonl([*pairs, {"prompt": "q", "chosen": " ", "rejected": "n"}]), kind, max_prompt_length=6, **CUT)
        assert cut.statistics["shortened"] == 1
    assert built(jsonl(PAIRS), "demonstrations", **CUT).statistics["shortened"] == 0


def test_unused_rows_of_a_mixture_are_reported(built: Build) -> None:
    sources = [{"task": "max", "rows": 20, "weight": 1}, {"task": "sort", "rows": 200, "weight": 1}]
    data = built({"sources": sources}, "demonstrations")
    cut = data.statistics["sources"][1]["unused"]
    assert cut > 100
    assert account(data.statistics) == f"{220 - cut} of 220: {cut} not drawn"
    (sentence,) = losses(data.statistics, "first_exhausted")
    assert sentence.startswith(
        f"task:sort/train: {cut} of 200 rows ({cut / 200:.0%}) are never used, because `mixing: first_exh"
    )
    repeated = built({"sources": sources, "mixing": "all_exhausted"}, "demonstrations")
    assert losses(repeated.statistics, "all_exhausted") == []


def test_length_statistics_by_hand(built: Build, jsonl: Write) -> None:
    # Completions of 1 to 20 bytes and EOS: 2 to 21 tokens. Nearest rank: p50 is number 10, p95 number 19.
    data = built(jsonl([{"prompt": "p", "completion": "c" * n} for n in range(1, 21)]), "demonstrations")
    assert data.statistics["tokens"]["completion"] == {"min": 2, "mean": 11.5, "p50": 11, "p95": 20, "max": 21}
    assert data.statistics["tokens"]["prompt"] == {"min": 3, "mean": 3.0, "p50": 3, "p95": 3, "max": 3}


def test_progress_counts_up_to_the_end(tokenizer: Any) -> None:
    config = DataConfig.model_validate({"task": "max", "rows": 450})
    seen: list[tuple[int, int | None]] = []
    build(
        config, [pin(config.sources[0])], tokenizer, "demonstrations", 0, lambda done, total: seen.append((done, total))
    )
    assert seen == [(200, 450), (400, 450), (450, 450)]


def test_more_rows_than_a_block_keep_their_order(built: Build, jsonl: Write) -> None:
    rows = [{"text": str(number)} for number in range(2500)]
    data = built(jsonl(rows), "demonstrations", shuffle=False)
    assert column(data, "text") == [f"{number}<eos>" for number in range(2500)]


def test_a_token_that_the_model_has_no_embedding_for_is_refused(jsonl: Write) -> None:
    """Of a tokenizer that was extended for a chat template, while its model kept 264 embeddings."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    config = DataConfig.model_validate({"sources": [str(jsonl([{"prompt": "p", "completion": "c"}]))]})
    pinned = [pin(config.sources[0])]
    named = r"train.jsonl:1: the row has the token '<\|im_end\|>' with the id 265, but the model has embeddings for 265 tokens"
    with pytest.raises(UserError, match=named):
        build(config, pinned, tokenizer, "demonstrations", 0, embeddings=265)
    for enough in (266, None):
        assert len(build(config, pinned, tokenizer, "demonstrations", 0, embeddings=enough).train) == 1


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("prompts", {}),
        ("demonstrations", {"completion": [{"role": "assistant", "content": " yes."}]}),
        ("preferences", {"chosen": " yes.", "rejected": [{"role": "assistant", "content": " no."}]}),
        ("unpaired", {"completion": " yes.", "label": True}),
    ],
)
def test_a_prompt_that_answers_would_have_to_continue_is_malformed(
    built: Build, jsonl: Write, kind: str, answers: dict[str, Any]
) -> None:
    """TRL gives such a prompt to the template with `continue_final_message`; a new turn would be another conversation."""
    prompt = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "I think"}]
    with pytest.raises(
        DataError, match=r"train.jsonl:1: the prompt ends with an assistant message, which answers do not"
    ):
        built(jsonl([{"prompt": prompt, **answers}]), kind)
    assert len(built(jsonl([{"prompt": prompt[:1], **answers}]), kind).train) == 1


def test_a_completion_may_go_on_with_the_user_behind_an_assistants_message(built: Build, jsonl: Write) -> None:
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    data = built(jsonl([{"prompt": turns[:2], "completion": turns[2:]}]), "demonstrations")
    assert column(data, "text") == ["<user>a<assistant>b<eos><user>c<assistant>d<eos>"]
