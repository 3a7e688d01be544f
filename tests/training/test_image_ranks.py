"""Image-text models under DeepSpeed: steps are those of plain ``transformers`` and AdamW, at every ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment_core.models.image_text import vision_parameters
from alignment_core.models.images import ImageProcessor
from alignment_core.models.saving import save_checkpoint
from tests.images import LLAVA_IMAGE, QWEN_IMAGE, tiny_llava, tiny_qwen_vl, write_images
from tests.matrix import matrix
from tests.training import image_ranks
from tests.training.sharded_ranks import run

pytestmark = pytest.mark.slow
MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "qwen2_5_vl": (tiny_qwen_vl, QWEN_IMAGE),
    "llava": (tiny_llava, LLAVA_IMAGE),
}
ROWS = [
    ("IMAGE what", "red<eos>", ["red"]),
    ("only text", "yes<eos>", []),
    ("IMAGE or IMAGE?", "both<eos>", ["large", "wide"]),
]
"""Prompts, completions and images."""


def logp_of(model: Any, processor: ImageProcessor, prompt: str, completion: str, images: list[Path]) -> torch.Tensor:
    """The log-probability of a completion, in nats, with the processor's own call."""
    from PIL import Image

    opened = [Image.open(image) for image in images] or None
    inputs = processor._processor(text=[prompt + completion], images=opened, return_tensors="pt")
    logps = model(**inputs).logits[0, :-1].log_softmax(-1)
    ids = inputs["input_ids"][0]
    start = len(processor.expand(prompt, images))
    return logps[torch.arange(len(ids) - 1), ids[1:]][start - 1 :].sum()


def plain_steps(path: Path, rows: list[tuple[str, str, list[Path]]], trains_tower: bool) -> tuple[list[float], Any]:
    """Losses of steps with AdamW on the sum over rows, divided by the number that the ranks divide by."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    processor = ImageProcessor.of(path)
    assert processor is not None
    for parameter in () if trains_tower else vision_parameters(model):
        parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=image_ranks.RATE, eps=1e-3, weight_decay=0.0)
    losses = []
    for _ in range(image_ranks.STEPS):
        total = torch.zeros(())
        for row in rows:
            total = total - logp_of(model, processor, *row)
        loss = total / image_ranks.TARGETS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_master_weights_hold_a_frozen_tower(tmp_path: Path) -> None:
    """So that a later training may train it from its exact weights."""
    path = tiny_qwen_vl(tmp_path / "model")
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.bfloat16)
    processor = ImageProcessor.of(path)
    assert processor is not None
    save_checkpoint(model, path, tmp_path / "bf16")
    images = [write_images(tmp_path / "images")["large"]]
    ids = processor.expand(f"{QWEN_IMAGE} what", images)
    texts = [([*ids, 1, 2, 3], len(ids), [str(image) for image in images])]
    (names,) = run(1, tmp_path, image_ranks.masters, str(tmp_path / "bf16"), texts, str(tmp_path))
    assert [name.removeprefix("weights.model.") for name in names] == sorted(dict(model.named_parameters()))


def made(kind: str, folder: Path) -> tuple[Path, str, dict[str, Path], ImageProcessor]:
    """A tiny model's path, its placeholder for images, images by name, and its processor."""
    make, placeholder = MODELS[kind]
    path = make(folder / "model")
    processor = ImageProcessor.of(path)
    assert processor is not None
    return path, placeholder, write_images(folder / "images"), processor


@pytest.mark.parametrize(
    ("kind", "ranks", "trains_tower"),
    matrix(
        ["qwen2_5_vl", "llava"],
        [(1, 0), (2, 0), (2, 2), (2, 3)],
        [False, True],
        usual=[("qwen2_5_vl", (1, 0), False), ("qwen2_5_vl", (2, 3), True), ("llava", (2, 2), True)],
    ),
)
def test_steps_are_those_of_plain_transformers(
    kind: str, ranks: tuple[int, int], trains_tower: bool, tmp_path: Path
) -> None:
    """``ranks``: their number, and the ZeRO stage."""
    path, placeholder, images, processor = made(kind, tmp_path)
    rows = [
        (prompt.replace("IMAGE", placeholder), completion, [images[name] for name in names])
        for prompt, completion, names in ROWS
    ]
    texts = []
    for prompt, completion, paths in rows:
        ids = processor.expand(prompt + completion, paths)
        texts.append((ids, len(processor.expand(prompt, paths)), [str(path) for path in paths]))
    check(path, rows, texts, ranks, trains_tower, tmp_path)


def uneven_rows(
    processor: ImageProcessor, placeholder: str, images: dict[str, Path]
) -> tuple[list[tuple[str, str, list[Path]]], image_ranks.Texts]:
    """Of two ranks, by micro-batch: one image twice beside text; text beside one image; one image twice beside one image."""
    rows, texts = [], []
    for tokens, names in (
        (34, ["red", "red"]),
        (32, []),
        (30, []),
        (28, ["green"]),
        (26, ["blue"] * 2),
        (24, ["wide"]),
    ):
        prompt, paths = placeholder * len(names) + " what", [images[name] for name in names]
        start = len(processor.expand(prompt, paths))
        completion = "all colours or none, or any"[: tokens - start - 1] + "<eos>"
        rows.append((prompt, completion, paths))
        texts.append((processor.expand(prompt + completion, paths), start, [str(path) for path in paths]))
    assert image_ranks.images_of_packs(texts, 2) == [[2, 0, 2], [0, 1, 1]]
    return rows, texts


@pytest.mark.parametrize(
    ("kind", "stage", "trains_tower"),
    matrix(
        ["qwen2_5_vl", "llava"],
        [0, 1, 2, 3],
        [False, True],
        usual=[("qwen2_5_vl", 2, True), ("qwen2_5_vl", 3, True), ("llava", 3, False)],
    ),
)
def test_steps_are_those_of_plain_transformers_where_some_ranks_have_no_image(
    kind: str, stage: int, trains_tower: bool, tmp_path: Path
) -> None:
    path, placeholder, images, processor = made(kind, tmp_path)
    rows, texts = uneven_rows(processor, placeholder, images)
    check(path, rows, texts, (2, stage), trains_tower, tmp_path)


def test_a_model_that_is_not_trained_gives_the_values_of_plain_transformers_where_some_ranks_have_no_image(
    tmp_path: Path,
) -> None:
    path = tiny_qwen_vl(tmp_path / "model")
    processor = ImageProcessor.of(path)
    assert processor is not None
    rows, texts = uneven_rows(processor, QWEN_IMAGE, write_images(tmp_path / "images"))
    first, second = run(2, tmp_path, image_ranks.logps, str(path), texts)
    assert (first.keys(), second.keys()) == ({"0", "2", "4"}, {"1", "3", "5"})
    values = first | second
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = [float(logp_of(model, processor, *row)) for row in rows]
    assert [values[str(number)] for number in range(len(rows))] == pytest.approx(expected, rel=1e-5)


def test_rows_of_text_are_trained_at_zero_3_without_a_processor(tmp_path: Path) -> None:
    path = tiny_qwen_vl(tmp_path / "model")
    processor = ImageProcessor.of(path)
    assert processor is not None
    rows, texts = [], []
    for completion in ("yes", "yes, of course", "no", "maybe", "what?"):
        rows.append(("only text", f"{completion}<eos>", list[Path]()))
        ids = processor.expand(f"only text{completion}<eos>", [])
        texts.append((ids, len("only text"), []))
    check(path, rows, texts, (2, 3), trains_tower=False, tmp_path=tmp_path)


def check(
    path: Path,
    rows: list[tuple[str, str, list[Path]]],
    texts: Any,
    ranks: tuple[int, int],
    trains_tower: bool,
    tmp_path: Path,
) -> None:
    """Steps of so many ranks at a ZeRO stage beside those of plain ``transformers``, and the models after them. Rows of text
    are trained without the model's processor."""
    world, stage = ranks
    expected, model = plain_steps(path, rows, trains_tower)
    if not any(images for *_, images in rows):
        (path / "preprocessor_config.json").unlink()

    training = {"train_vision_tower": True} if trains_tower else {}
    arguments = (str(path), texts, stage, training, str(tmp_path))
    for losses, resumes in run(world, tmp_path, image_ranks.steps, *arguments):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert resumes
    assert expected[-1] < 0.9 * expected[0], "it trains"

    trained = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "trained", dtype=torch.float32)
    start = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    ours, theirs, before = (dict(of.named_parameters()) for of in (trained, model, start))
    for name, parameter in ours.items():
        assert torch.allclose(parameter, theirs[name], atol=2e-5), name
    frozen = {id(parameter) for parameter in vision_parameters(trained)}
    changed = {id(ours[name]) for name in ours if not torch.equal(ours[name], before[name])}
    assert bool(changed & frozen) is trains_tower
    assert load_file(tmp_path / "trained" / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()
