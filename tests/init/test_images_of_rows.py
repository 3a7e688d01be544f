"""First recipes from rows with images: an image-text model, its lengths, held-out rows that name the same files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Store
from alignment_core.errors import UserError
from alignment_core.init import models
from alignment_core.init.held_out import held_out_file
from alignment_core.init.images import copied
from alignment_core.init.rows import find
from alignment_core.recipes import load_recipe
from tests.images import tiny_qwen_vl, write_images
from tests.init.conftest import Draft, problems
from tests.init.rows_of_kinds import jsonl


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_vl(tmp_path_factory.mktemp("model") / "tiny")


def asked(number: int, **part: Any) -> list[dict[str, Any]]:
    content = [{"type": "image", **part}, {"type": "text", "text": f"which colour is number {number}?"}]
    return [{"role": "user", "content": content}]


def answered(number: int, **part: Any) -> dict[str, Any]:
    return {"messages": [*asked(number, **part), {"role": "assistant", "content": f"it is red, {number}"}]}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Demonstrations in a folder of their own, beside which the recipe is not."""
    write_images(tmp_path / "data" / "pictures")
    return jsonl(tmp_path / "data" / "rows.jsonl", [answered(n, image="pictures/wide.png") for n in range(30)])


def test_a_recipe_of_rows_with_images_passes_its_checks(rows: Path, model: Path, draft: Draft, store: Store) -> None:
    result = draft(rows, model=str(model))
    output = rows.parent.parent / "recipe.yaml"
    assert load_recipe(output).method == "sft"
    assert problems(output, store) == []
    training = result.recipe["sft"]["training"]
    assert training["train_vision_tower"] is False
    lengths = result.profile.lengths
    assert lengths.problem is None
    text = len("<user>which colour is number 10?<assistant>it is red, 10<eos>")
    assert lengths.rows[-1] < text + 10, "an image of 56 by 28 pixels is two tokens"
    held_out = [json.loads(line) for line in held_out_file(output).read_text().splitlines()]
    paths = {part["image"] for row in held_out for part in row["messages"][0]["content"] if part["type"] == "image"}
    assert paths == {"data/pictures/wide.png"}
    assert len(held_out) == 4
    assert result.recipe["evaluation"]["prompts"]["sources"][0]["path"] == held_out_file(output).name


@pytest.mark.parametrize(
    ("row", "method"),
    [
        (lambda n: {"prompt": f"{n}?", "images": ["red.png"], "chosen": "red", "rejected": "blue"}, "dpo"),
        (lambda n: {"prompt": asked(n), "image": "red.png", "label": str(n)}, "rl"),
    ],
    ids=["pairs", "prompts"],
)
def test_images_in_columns_are_found(
    row: Any, method: str, model: Path, draft: Draft, store: Store, tmp_path: Path
) -> None:
    write_images(tmp_path)
    result = draft(jsonl(tmp_path / "rows.jsonl", [row(n) for n in range(12)]), model=str(model))
    assert (result.method, result.profile.mapping.images) == (method, True)
    column = "images" if method == "dpo" else "image"
    assert [name for name, roles, _ in result.columns if "images" in roles] == [column]
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_a_model_of_text_is_refused_for_images_in_messages(rows: Path, draft: Draft) -> None:
    says = (
        r"^--model scratch: reads text alone, and messages of .*rows\.jsonl have images: name an image-text model with"
    )
    with pytest.raises(UserError, match=says):
        draft(rows, model="scratch")


def test_a_model_of_text_leaves_a_column_of_images_out(draft: Draft, store: Store, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "images": ["red.png"], "completion": f"red {n}"} for n in range(12)]
    result = draft(jsonl(tmp_path / "rows.jsonl", rows), model="scratch")
    assert any("the images of rows are not read, because scratch reads none" in text for text in result.warnings)
    assert "train_vision_tower" not in result.recipe["sft"]["training"]
    assert problems(tmp_path / "recipe.yaml", store) == []


def test_the_default_model_reads_images(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_of_hub", lambda name, why, store: models.Model(name, why))
    assert models.choose(None, store, images=True).name == models.DEFAULT_WITH_IMAGES
    assert models.choose(None, store).name == models.DEFAULT_MODEL


def test_copies_of_rows_name_the_same_images(tmp_path: Path) -> None:
    row = {
        "images": ["a/1.png", "/b/2.png", "https://x.org/3.png", {"path": "4.png", "bytes": None}],
        "messages": [*asked(1, path="5.png"), {"role": "user", "content": "a/1.png"}],
        "picture": "6.png",
    }
    (tmp_path / "data").mkdir()
    data = find(str(jsonl(tmp_path / "data" / "rows.jsonl", [row])))
    copies = copied([row], {}, data, tmp_path)
    assert copies is not None
    assert copies[0]["images"][:3] == ["data/a/1.png", "/b/2.png", "https://x.org/3.png"]
    assert copies[0]["images"][3]["path"] == "data/4.png"
    assert copies[0]["messages"][0]["content"][0] == {"type": "image", "path": "data/5.png"}
    assert copies[0]["messages"][1]["content"] == "a/1.png"
    assert copies[0]["picture"] == "6.png"
    embedded = copied([{"image": {"bytes": b"red", "path": "1.png"}}], {}, data, tmp_path)
    assert embedded == [{"image": f"data:;base64,{base64.b64encode(b'red').decode()}"}]
    (tmp_path / "other").mkdir()
    jsonl(tmp_path / "other" / "rows.jsonl", [row])
    assert copied([row], {}, find(str(tmp_path / "*" / "rows.jsonl")), tmp_path) is None


def test_copies_of_rows_change_nothing_but_images(tmp_path: Path) -> None:
    """And paths begin at the folder of a link to a file, as where rows are read."""
    parts = [{"type": "image_url", "image_url": {"url": "1.png", "detail": "auto"}}]
    row = {
        "messages": [{"role": "user", "content": parts}],
        "images": [f"sha256:{'a' * 64}"],
        "meta": {"image": "a caption"},
    }
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    file = jsonl(tmp_path / "elsewhere" / "rows.jsonl", [row])
    (tmp_path / "data" / "rows.jsonl").symlink_to(file)
    copies = copied([row], {}, find(str(tmp_path / "data" / "rows.jsonl")), tmp_path)
    assert copies == [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data/1.png", "detail": "auto"}}],
                }
            ],
            "images": [f"data/images/{'a' * 64}"],
            "meta": {"image": "a caption"},
        }
    ]


def test_rows_with_verdicts_are_not_held_out_for_their_own_reason(model: Path, draft: Draft, tmp_path: Path) -> None:
    write_images(tmp_path)
    rows = [{"prompt": f"{n}?", "image": "red.png", "completion": f"red {n}", "label": n % 2 == 0} for n in range(40)]
    warnings = draft(jsonl(tmp_path / "rows.jsonl", rows), model=str(model)).warnings
    assert any("take the column `label` for a right answer" in text for text in warnings)
    assert not any("in several folders" in text for text in warnings)
