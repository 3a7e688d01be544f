"""Images of rows are read and rendered by the check of a recipe, and refused where a model reads text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from alignment_core.checks import rows as reader
from alignment_core.checks.rows import Question, TokenizerSource, answers_to
from alignment_core.data.pin import pin
from alignment_core.recipes import DataConfig
from alignment_core.stages.dataset import DatasetConfig
from tests.checks.recipes import look
from tests.images import tiny_qwen_vl, write_images


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_images(tmp_path / "pictures")
    rows = [
        {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"{number}?"}]}]}
        | {"images": ["pictures/wide.png"], "chosen": "red", "rejected": "blue"}
        for number in range(5)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(path: Path, model: Path, reads_images: bool) -> reader.Answer:
    data = DataConfig.model_validate({"path": str(path)})
    dataset = DatasetConfig(data=data, sources=tuple(map(pin, data.sources)), kind="preferences")
    source = TokenizerSource(folder=str(model))
    (answers,) = answers_to([Question(label="data", dataset=dataset, tokenizer=source, reads_images=reads_images)])
    return answers


def test_rows_have_the_lengths_that_their_images_give_them(model: Path, pairs: Path) -> None:
    answers = answer(pairs, model, reads_images=True)
    assert (answers.problem, answers.unseen, answers.read, answers.whole) == (None, None, 5, True)
    user, start, image, end, words, assistant = 1, 1, 2, 1, len("0?"), 1
    assert {prompt for prompt, _ in answers.sequences} == {user + start + image + end + words + assistant}


def test_a_missing_image_is_named_before_any_tokenizer_is_loaded(
    model: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pairs.parent / "pictures" / "wide.png").unlink()
    monkeypatch.setattr(reader, "_tokenizer", lambda source: pytest.fail("the tokenizer was loaded"))
    problem = str(answer(pairs, model, reads_images=True).problem)
    assert "pairs.jsonl:1: `images[0]` is 'pictures/wide.png': there is no such file" in problem


def test_of_many_images_only_some_are_read(model: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "WITH_IMAGES", 2)
    answers = answer(pairs, model, reads_images=True)
    assert (answers.problem, answers.read, answers.whole) == (None, 2, False)


@pytest.mark.slow
def test_a_recipe_is_checked_with_its_model(store: Any, model: Path, pairs: Path) -> None:
    recipe = {"method": "dpo", "name": "demo", "dpo": {"data": {"path": str(pairs)}}}
    assert look(store, {**recipe, "model": {"name": str(model)}}).problems == []
    (problem,) = look(store, {**recipe, "model": {"scratch": {"hidden_size": 64, "num_attention_heads": 2}}}).problems
    assert "pairs.jsonl:1: `prompt[0].content[0]` is a part of the type 'image', and only text is read here" in problem


TEXT = {"scratch": {"hidden_size": 64, "num_attention_heads": 2}}


@pytest.mark.slow
def test_judges_rewards_and_teachers_that_see_no_images_are_named(
    store: Any, model: Path, pairs: Path, tmp_path: Path
) -> None:
    rows = {"path": str(pairs)}
    scores_text = tmp_path / "reward"
    scores_text.mkdir()
    shape = {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    (scores_text / "config.json").write_text(json.dumps(shape))
    save_file({"score.weight": torch.zeros(1, 1)}, scores_text / "model.safetensors")
    evaluation = {
        "prompts": rows,
        "generation": {"max_completion_length": 4},
        "judge": {"served_judge": {"name": str(model)}},
        "rewards": [{"reward_model": str(scores_text)}],
    }
    base = {"name": "demo", "model": {"name": str(model)}}
    report = look(
        store, {**base, "method": "evaluate", "models": {"other": {"name": str(model)}}, "evaluation": evaluation}
    )
    assert sorted(problem.partition(":")[0] for problem in report.problems) == [
        "evaluation.judge.served_judge",
        "evaluation.rewards.0.reward_model",
    ]
    assert all("have images" in problem for problem in report.problems)
    prompted: dict[str, Any] = {
        **base,
        "method": "distillation",
        "distillation": {
            "teacher": {"model": TEXT},
            "on_policy": {"prompts": rows, "generation": {"max_completion_length": 4}},
        },
    }
    (problem,) = look(store, prompted).problems
    assert problem.startswith("distillation.teacher.model: the text has images, and the teacher reads none")
    prompted["distillation"]["teacher"]["model"] = {"name": str(model)}
    assert look(store, prompted).problems == []
