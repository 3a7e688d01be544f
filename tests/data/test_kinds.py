"""A kind of rows, and an origin of rows, from an installed distribution are used as those of ours are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from alignment_core.checks.rows import Question, TokenizerSource, answers_to, ask
from alignment_core.data import kinds
from alignment_core.data.build import write
from alignment_core.data.pin import pin
from alignment_core.errors import DataError, UserError
from alignment_core.lineage.samples import of_data
from alignment_core.processes import inherited
from alignment_core.recipes.row_plugins import formats
from alignment_core.recipes.sections.data import DataConfig, DataSource
from alignment_core.stages.dataset import DatasetConfig
from tests.data.conftest import Build, Write
from tests.distributions import distribution, site_packages

OURS = ("demonstrations", "documents", "preferences", "prompts", "sampled", "stepwise", "texts", "unpaired")
ROWS = [{"prompt": f"p{number % 8}", "completion": f"c{number}", "desirable": bool(number % 2)} for number in range(24)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """The plug-in of the kind ``labelled`` is installed."""
    module = (Path(__file__).parent / "labelled_rows.py").read_text()
    offers = {"alignment.kinds": {"labelled": "labelled_rows:KIND"}}
    with site_packages(distribution(tmp_path / "site", "kto", offers, {"labelled_rows.py": module})) as site:
        yield site


def question(path: Path) -> Question:
    data = DataConfig.model_validate({"path": str(path), "test_rows": 3})
    dataset = DatasetConfig(data=data, sources=(pin(data.sources[0]),), kind="labelled")
    return Question(label="kto/data", dataset=dataset, tokenizer=TokenizerSource(), context=64)


def test_our_kinds_and_their_formats_are_collected() -> None:
    assert kinds.KINDS.names() == OURS
    known = {
        "messages",
        "prompt_completion",
        "text",
        "preference",
        "hh",
        "prompts",
        "stepwise",
        "math_shepherd",
        "unpaired",
    }
    assert set(formats()) == known
    assert {kinds.load(name).native for name in OURS} < known


def test_a_completion_is_a_list_of_token_ids(built: Build, jsonl: Write) -> None:
    row = {"prompt": "p", "completion": "c", "completion_ids": [99, 257]}
    built_row = built(jsonl([row]), "sampled").train.to_pylist()[0]
    assert (built_row["input_ids"][-2:], sum(built_row["loss_mask"])) == ([99, 257], 2)
    assert built(jsonl([row, {**row, "completion": " "}]), "sampled").statistics["dropped"] == {"empty_completion": 1}
    for wrong in ("99 257", [99, "257"], [-1]):
        with pytest.raises(DataError, match=r"`completion_ids` is .*; a list of token ids is needed"):
            built(jsonl([{**row, "completion_ids": wrong}]), "sampled")
    with pytest.raises(UserError, match="built-in tasks do not provide sampled completions"):
        built({"task": "max", "rows": 3}, "sampled")


def test_without_the_plug_in_its_name_and_format_are_unknown(built: Build, jsonl: Write) -> None:
    with pytest.raises(UserError, match="there is no kind of rows 'labelled'"):
        built(jsonl(ROWS), "labelled")
    with pytest.raises(ValueError, match=r"Input should be 'auto', 'messages', .* or 'unpaired'"):
        DataSource.model_validate({"path": "rows.jsonl", "format": "labelled"})


def test_the_run_form_offers_the_format_of_the_plug_in(site: Path) -> None:
    assert "'labelled'" in str(DataSource.model_json_schema())


def test_rows_of_a_plugin_kind_are_read_held_out_and_counted(site: Path, built: Build, jsonl: Write) -> None:
    data = built(
        {"sources": [{"path": str(jsonl(ROWS)), "format": "labelled"}], "test_rows": 3, "shuffle": False}, "labelled"
    )
    assert (data.train.num_rows, data.test.num_rows) == (21, 3)
    assert not set(data.train["prompt"].to_pylist()) & set(data.test["prompt"].to_pylist())
    assert data.train.schema.field("desirable").type == pa.bool_()
    first = data.train.to_pylist()[0]
    given: dict[str, Any] = ROWS[int(first["source"].split(":")[1]) - 1]
    assert (first["completion"], first["desirable"]) == (given["completion"], given["desirable"])
    assert first["completion_ids"] == [*given["completion"].encode(), 257]
    assert data.statistics["kind"] == "labelled"
    assert data.statistics["tokens"]["targets"] == sum(map(len, data.train["completion_ids"].to_pylist()))


def test_rows_of_a_plugin_kind_are_truncated_and_refused(site: Path, built: Build, jsonl: Write) -> None:
    long = [{**row, "completion": "x" * 30} for row in ROWS]
    assert built(jsonl([*ROWS, *long]), "labelled", max_length=16).statistics["dropped"] == {"too_long": 24}
    cut = built(jsonl(long), "labelled", max_length=16, overlong="truncate")
    assert cut.statistics["shortened"] == 24
    with pytest.raises(UserError, match=r"train.jsonl:1: `desirable` is the text 'yes'; true or false is needed"):
        built(jsonl([{**ROWS[0], "desirable": "yes"}]), "labelled")
    with pytest.raises(UserError, match="looked for `prompt` and `completion` and `desirable`"):
        built(jsonl([{"text": "a"}]), "labelled")


def test_a_built_in_task_generates_rows_of_the_plug_in(site: Path, built: Build) -> None:
    data = built({"task": "reverse", "rows": 200, "options": {"correct": 0.5}}, "labelled")
    for row in data.train.to_pylist():
        word = row["prompt"].split("reverse: ")[1][:4]
        assert row["desirable"] == (row["completion"] == word[::-1])
    assert 70 <= sum(data.train["desirable"].to_pylist()) <= 130  # 100 expected, standard deviation 7


def test_align_check_reads_rows_of_the_plug_in_in_its_own_process(
    site: Path, jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    (answer,) = ask([question(jsonl(ROWS))])
    assert (answer.problem, answer.unseen, answer.read, answer.whole) == (None, None, 24, True)
    (answer,) = answers_to([question(jsonl([*ROWS, {**ROWS[0], "completion": "x" * 99}]))])
    assert "the row has 104 tokens, but the model takes at most 64" in str(answer.problem)


def test_samples_show_the_texts_of_rows_of_the_plug_in(site: Path, built: Build, jsonl: Write, tmp_path: Path) -> None:
    write(built(jsonl(ROWS[:1]), "labelled"), tmp_path / "out")
    (row,) = of_data(tmp_path / "out/train.parquet")
    assert row == {"prompt": "<user>p0<assistant>", "completion": "c0", "desirable": False}


@pytest.mark.parametrize(
    ("kind", "shown"), [("demonstrations", ["text"]), ("preferences", ["prompt", "chosen", "rejected"])]
)
def test_samples_show_rows_without_token_ids(built: Build, tmp_path: Path, kind: str, shown: list[str]) -> None:
    write(built({"task": "max", "rows": 3}, kind), tmp_path)
    assert list(of_data(tmp_path / "train.parquet")[0]) == shown


def test_a_text_of_a_task_is_a_target_as_a_whole(built: Build) -> None:
    row = built({"task": "max", "rows": 3}, "texts").train.to_pylist()[0]
    assert row["text"].startswith("max: ")
    assert row["loss_mask"] == [1] * len(row["input_ids"])


LIBRARY = """
from alignment_core.data.origins import Library

class Sums(Library):
    description = "Name of sums, for prompts."
    def pin(self, source):
        return {}
    def name(self, pinned):
        return f"sums:{pinned.source.origin}"
    def content(self, pinned):
        return {"version": "1"}
    def prompts(self, source, seed):
        return ({"prompt": f"{seed % 7}+{number}", "label": str(seed % 7 + number)} for number in range(20))

ORIGIN = Sums()
"""
READS = """
from alignment_core.data.build import build
from alignment_core.data.pin import pin
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import DataConfig

data = DataConfig.model_validate({"my_sums": "small", "rows": 5, "shuffle": False})
pinned = pin(data.sources[0])
print(build(data, [pinned], byte_tokenizer(), "prompts", 0).train["source"][4], pinned.content()["made"])
assert "Name of sums" in str(DataConfig.model_json_schema())
"""


def test_a_plugin_origin_is_a_field_of_a_source(tmp_path: Path) -> None:
    """In a separate process: the fields of recipes are collected when their module is imported."""
    offers = {"alignment.origins": {"my-sums": "sums:ORIGIN"}}
    site = distribution(tmp_path, "sums", offers, {"sums.py": LIBRARY})
    done = subprocess.run(
        [sys.executable, "-c", READS], env=inherited(PYTHONPATH=str(site)), capture_output=True, text=True
    )
    assert done.stdout == "sums:small:5 {'my_sums': 'small'}\n", done.stderr
