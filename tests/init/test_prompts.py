"""`align generate` reads the same prompts as `align init`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.cli.generate import _data
from alignment_core.data.fields import Fields
from alignment_core.data.kinds import load
from alignment_core.errors import UserError
from alignment_core.init import rows
from alignment_core.init.prompts import prompts_of
from alignment_core.recipes import DataSource
from alignment_core.recipes.load import parse_recipe
from tests.init.conftest import Draft
from tests.init.rows_of_kinds import ROWS, jsonl

SHARED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "bench-prompts"
TURNS = [{"question_id": number, "turns": [f"Say {number}.", "Say it again."]} for number in range(3)]


@pytest.mark.parametrize("name", [name for name, (method, *_) in ROWS.items() if method != "continued-pretraining"])
def test_generate_reads_rows_with_prompts_as_init_does(name: str, draft: Draft, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS[name][2])
    try:
        result = draft(path, method="generate")
    except UserError:
        with pytest.raises(UserError):
            prompts_of(str(path))
        return
    (source,) = result.recipe["generate"]["prompts"]["sources"]
    data, _ = prompts_of(str(path))
    template = data.pop("prompt_template", None)
    assert template == result.recipe["generate"]["prompts"].get("prompt_template")
    for config in (source, data):  # a guessed right answer is not part of a prompt
        config["columns"] = {role: column for role, column in config.get("columns", {}).items() if role != "label"}
    assert Path(data.pop("path")) == path
    assert data == {key: value for key, value in source.items() if key != "path"}


def prompt_of(data: dict[str, Any], row: dict[str, Any]) -> Any:
    """The prompt of a row."""
    source = DataSource.model_validate({name: value for name, value in data.items() if name != "prompt_template"})
    kind = load("prompts")
    return kind.formats["prompts"].parse(Fields(row, dict(source.columns))).prompt  # type: ignore[attr-defined]


def test_the_first_of_several_turns_is_the_prompt_and_further_turns_are_noted(tmp_path: Path) -> None:
    data, notes = prompts_of(str(jsonl(tmp_path / "bench.jsonl", TURNS)))
    assert data["columns"] == {"prompt": "turns.0"}
    assert prompt_of(data, TURNS[1]) == "Say 1."
    assert notes[0] == "3 of 3 rows have further turns in `turns`: only the first is asked"
    assert notes[1].endswith("`turns.0` is the prompt")


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/bench-prompts is not here")
@pytest.mark.parametrize("name", ["mt_bench", "vicuna_bench"])
def test_published_prompts_of_benchmarks_are_read(name: str) -> None:
    path = SHARED / f"{name}.jsonl"
    data, _ = prompts_of(str(path))
    first = json.loads(path.read_text().splitlines()[0])
    assert prompt_of(data, first) == first["turns"][0]
    content = {"method": "generate", "name": "a", "model": "a/b", "generate": {"prompts": {**data, "shuffle": False}}}
    assert parse_recipe(content, refuse_unused=True).method == "generate"


def test_folders_globs_and_further_columns_are_read(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        jsonl(tmp_path / "two" / f"{name}.jsonl", [{"instruction": "Add.", "input": "1 and 2"}])
    data, notes = prompts_of(f"{tmp_path}/two/*.jsonl")
    assert [Path(source["path"]).name for source in data["sources"]] == ["a.jsonl", "b.jsonl"]
    assert data["prompt_template"] == "{prompt}\n\n{input}"
    assert any("`instruction` is the prompt" in note for note in notes)
    assert "path" in prompts_of(f"{tmp_path}/two")[0]


def test_rows_without_a_prompt_are_refused_with_their_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"alpha": 1, "beta": 2}])
    with pytest.raises(UserError, match="alpha, beta"):
        prompts_of(str(path))


def test_the_advice_for_rows_without_a_prompt_is_an_option_of_generate(tmp_path: Path) -> None:
    """`align generate` has no option `--column`: its columns are fields of the recipe."""
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "Say it."}])
    with pytest.raises(UserError) as refused:
        prompts_of(str(path))
    assert "--column" not in str(refused.value)
    assert "--set generate.prompts.columns.ROLE=NAME" in str(refused.value)


def test_a_hub_name_whose_columns_are_given_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`align generate MODEL acme/asked --set generate.prompts.columns.prompt=text` reads the data set of the Hub."""

    def of_hub(name: str) -> rows.Rows:
        return rows.Rows(name, [{"path": name, "split": "test"}], [{"text": "Say it."}], 1, True, [])

    monkeypatch.setattr(rows, "_of_hub", of_hub)
    data, notes = _data("acme/asked", ["generate.prompts.columns.prompt=text"])
    assert data == {"path": "acme/asked", "split": "test"}
    assert notes == []
