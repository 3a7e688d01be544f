"""Distillation of rows with images: the teacher reads them, and the student's data has their files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from alignment_core.artifacts import open_store
from alignment_core.errors import UserError
from alignment_core.models.images import ImageProcessor
from alignment_core.models.model_ref import Model
from alignment_core.rollout.schemas import rollout_schema, write_table
from alignment_core.stages import teacher_logps
from alignment_core.stages.teacher_logps import TeacherLogpsConfig
from alignment_core.training.methods.sft import Sft
from alignment_core.training.training_rows import read_rows
from tests.images import tiny_qwen_vl, write_images
from tests.stages.calls import reference
from tests.stages.test_images_in_stages import run

TOP = 3
ANSWER = [97, 98, 257]
PICTURES = ("red", "wide", None)
"""Images of the rows: of one token, of two, and none."""


def ids_of(processor: ImageProcessor, files: dict[str, Path], picture: str | None) -> list[int]:
    text = f"<user>{processor.placeholder if picture else ''}?<assistant>"
    return processor.expand(text, [files[picture]] if picture else [])


def write_rows(folder: Path, model: Path, files: dict[str, Path], kind: str) -> Path:
    """Demonstrations, or completions of prompts, with the same tokens."""
    processor = ImageProcessor.of(model)
    assert processor is not None
    (folder / "images").mkdir(parents=True)
    prompts = [ids_of(processor, files, picture) for picture in PICTURES]
    images: list[list[str]] = []
    for picture in PICTURES:
        content = files[picture].read_bytes() if picture else b""
        digest = hashlib.sha256(content).hexdigest()
        if picture:
            (folder / "images" / digest).write_bytes(content)
        images.append([digest] if picture else [])
    if kind == "data":
        columns: dict[str, Any] = {
            "input_ids": pa.array([[*prompt, *ANSWER] for prompt in prompts], pa.list_(pa.int32())),
            "loss_mask": pa.array([[0] * len(prompt) + [1] * len(ANSWER) for prompt in prompts], pa.list_(pa.int8())),
            "text": ["?"] * len(prompts),
            "source": ["rows:1"] * len(prompts),
            "images": images,
        }
        pq.write_table(pa.table(columns), folder / "train.parquet")
        return folder
    rows = [
        {"prompt": number, "sample": 0, "prompt_ids": prompt, "completion_ids": ANSWER, "images": of_row}
        | {
            "logps": [0.0] * len(ANSWER),
            "finish_reason": "stop",
            "prompt_text": "?",
            "completion_text": "ab",
            "source": "r",
        }
        for number, (prompt, of_row) in enumerate(zip(prompts, images, strict=True))
    ]
    write_table(rows, rollout_schema(with_images=True), folder / "shard-00000.parquet")
    return folder


def likeliest(model: Path, files: dict[str, Path], picture: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities [targets, TOP] of plain ``transformers`` at each token of the answer, among the tokens of the
    tokenizer: further rows of the head are no candidates of a teacher."""
    processor = ImageProcessor.of(model)
    assert processor is not None
    prompt = ids_of(processor, files, picture)
    ids = torch.tensor([[*prompt, *ANSWER]])
    lm = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    tokens = len(transformers.AutoTokenizer.from_pretrained(model))
    more = dict(processor.tensors([files[picture]])) if picture else {}
    with torch.no_grad():
        logits = lm(input_ids=ids, mm_token_type_ids=(ids == processor.image_token_id).int(), **more).logits
    best = logits[0, len(prompt) - 1 : -1, :tokens].log_softmax(-1).topk(TOP)
    return best.indices.numpy(), best.values.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data", "rollouts"])
def test_the_teacher_sees_images_and_the_student_gets_their_files(kind: str, machines: Any, tmp_path: Path) -> None:
    files = write_images(tmp_path / "pictures")
    teacher = tiny_qwen_vl(tmp_path / "teacher", seed=2)
    store = open_store(tmp_path / "store")
    rows = store.publish(write_rows(tmp_path / "rows", teacher, files, kind), kind)
    inputs = {"model": store.publish(teacher, "model"), kind: rows}
    outputs, _ = run(store, machines(1), "teacher_logps", TeacherLogpsConfig(top_k=TOP), **inputs)
    table = pq.read_table(outputs["dataset"] / "train.parquet")
    for picture, row in zip(PICTURES, table.to_pylist(), strict=True):
        ids, logps = likeliest(teacher, files, picture)
        assert row["teacher_ids"] == ids.flatten().tolist()
        np.testing.assert_allclose(row["teacher_logps"], logps.flatten(), atol=1e-5)
    read = [sequence for row in read_rows(outputs["dataset"] / "train.parquet", Sft()) for sequence in row.sequences]
    contents = [[Path(image).read_bytes() for image in sequence.images] for sequence in read]
    assert contents == [[files[picture].read_bytes()] if picture else [] for picture in PICTURES]


def check(model: Path, rows: Path, tmp_path: Path) -> None:
    context: Any = SimpleNamespace(
        inputs={"data": rows}, output=tmp_path, model=lambda role: Model(model, reference("model", "a"))
    )
    teacher_logps.run(context, TeacherLogpsConfig(top_k=TOP))


def test_teachers_that_do_not_see_the_students_images_are_refused(tmp_path: Path) -> None:
    files, student = write_images(tmp_path / "pictures"), tiny_qwen_vl(tmp_path / "model")
    rows = write_rows(tmp_path / "rows", student, files, "data")
    settings = student / "preprocessor_config.json"
    smaller = json.loads(settings.read_text())
    smaller["size"] = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}
    settings.write_text(json.dumps(smaller))
    with pytest.raises(
        UserError, match=r"^distillation\.teacher\.model: images of a row take 1 tokens for .*, and 2 for"
    ):
        check(student, rows, tmp_path)
    (student / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(UserError, match=r"^distillation\.teacher\.model: the text has images, and .* reads none: give"):
        check(student, rows, tmp_path)
