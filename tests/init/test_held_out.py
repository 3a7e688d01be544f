"""The evaluation rows of a first recipe: held-out rows, those of a test split, or rows named by the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import UserError
from tests.init.conftest import Draft, problems
from tests.init.rows_of_kinds import ROWS, jsonl


def test_held_out_rows_are_in_a_file_and_no_prompt_of_theirs_is_trained_on(draft: Draft, tmp_path: Path) -> None:
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS["question and response"][2]))
    assert result.recipe["sft"]["data"]["sources"][1]["held_out"] is True
    assert result.recipe["evaluation"]["prompts"]["sources"][0]["path"] == "recipe.held-out.jsonl"
    assert all(row in ROWS["question and response"][2] for row in result.profile.held_out.rows)
    assert len(result.profile.held_out.rows) == 4


def test_too_few_rows_are_all_trained_on_with_a_warning(draft: Draft, store: Store, tmp_path: Path) -> None:
    result = draft(jsonl(tmp_path / "rows.jsonl", ROWS["prompt and completion"][2][:1]))
    assert "evaluation" not in result.recipe
    assert result.warnings == [
        "nothing is held out of 1 row, so that nothing is evaluated: name other rows with --eval-data"
    ]
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_rows_to_measure_on_may_be_named(draft: Draft, store: Store, tmp_path: Path) -> None:
    content = ROWS["question and response"][2]
    train, test = jsonl(tmp_path / "a.jsonl", content[:30]), jsonl(tmp_path / "b.jsonl", content[30:])
    result = draft(train, eval_data=str(test))
    assert result.profile.held_out.rows == []
    assert [source["path"] for source in result.recipe["sft"]["data"]["sources"]] == [str(train), str(test)]
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_rows_to_measure_on_need_the_same_columns(draft: Draft, tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", ROWS["question and response"][2])
    with pytest.raises(UserError, match=r"--column prompt=question: the first row of .*b.jsonl has prompt, completion"):
        draft(train, eval_data=str(jsonl(tmp_path / "b.jsonl", ROWS["prompt and completion"][2])))


def test_the_training_rows_are_refused_as_evaluation_rows(draft: Draft, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["question and response"][2])
    with pytest.raises(UserError, match=r"--eval-data .*rows\.jsonl is among the rows to train on"):
        draft(file, eval_data=str(file))


@pytest.mark.parametrize("method", ["kto", "sft"])
def test_a_thumb_is_never_taken_for_the_right_answer_to_a_prompt(
    method: str, draft: Draft, store: Store, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS["labels"][2])
    result = draft(file, method=method)
    assert result.recipe[method]["data"]["test_rows"] == 4
    assert "evaluation" not in result.recipe
    assert problems(tmp_path / "recipe.yaml", store) == []
    result = draft(file, method=method, eval_data=str(jsonl(tmp_path / "test.jsonl", ROWS["labels"][2])))
    assert "evaluation" not in result.recipe
    assert any("prompts would take the column `label` for a right answer" in warning for warning in result.warnings)


def test_a_constant_prompt_leaves_nothing_to_hold_out(draft: Draft, store: Store, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": "be nice", "completion": f"a {n}"} for n in range(40)])
    assert "test_rows" not in draft(file).recipe["sft"]["data"]
    pairs = [{"prompt": "be nice", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(40)]
    result = draft(jsonl(tmp_path / "pairs.jsonl", pairs), method="reward-model")
    assert "test_rows" not in result.recipe["reward_model"]["data"]


def test_one_instruction_with_many_inputs_leaves_rows_to_hold_out(draft: Draft, tmp_path: Path) -> None:
    content = [{"instruction": "Rate it.", "input": f"news {n}", "output": "good"} for n in range(40)]
    result = draft(jsonl(tmp_path / "rows.jsonl", content))
    assert result.recipe["sft"]["data"]["prompt_template"] == "{prompt}\n\n{input}"
    assert len(result.profile.held_out.rows) == 4, "a tenth"


def test_rows_held_out_by_an_earlier_init_are_no_data(draft: Draft, store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "a.jsonl", ROWS["labels"][2])
    output = folder / "recipe.yaml"
    assert draft(folder, output=output).profile.rows.count == 40
    assert problems(output, store) == []
    assert draft(folder, output=output).profile.rows.count == 40
    assert draft(f"{folder}/*.jsonl", output=output).profile.rows.count == 40


def test_the_column_of_tools_is_that_of_the_prompts_to_measure_on_too(draft: Draft, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [{"prompt": f"{number}?", "completion": "yes", "functions": tools} for number in range(40)]
    result = draft(jsonl(tmp_path / "rows.jsonl", rows), columns={"tools": "functions"})
    assert result.recipe["sft"]["data"]["sources"][0]["columns"] == {"tools": "functions"}
    assert result.recipe["evaluation"]["prompts"]["sources"][0]["columns"]["tools"] == "functions"
