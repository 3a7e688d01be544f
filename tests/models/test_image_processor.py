"""Processors of image-text models: ids and tensors are those of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alignment_core.errors import UserError
from alignment_core.models.images import ImageProcessor
from tests.images import LLAVA_IMAGE, QWEN_IMAGE, tiny_llava, tiny_qwen_vl, write_images


def _processor(folder: Path) -> ImageProcessor:
    processor = ImageProcessor.of(folder)
    assert processor is not None
    return processor


def test_an_image_has_as_many_tokens_as_its_size_needs_in_qwen(tmp_path: Path) -> None:
    """28 pixels a token: patches of 14, merged 2×2."""
    images = write_images(tmp_path / "images")
    processor = _processor(tiny_qwen_vl(tmp_path / "model"))
    pad = processor.image_token_id
    start, end = pad - 2, pad - 1
    text = f"a{QWEN_IMAGE}b{QWEN_IMAGE}"
    expected = [97, start, pad, end, 98, start, pad, pad, end]
    assert processor.expand(text, [images["red"], images["wide"]]) == expected
    tensors = processor.tensors([images["red"], images["wide"]])
    assert tensors["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]]
    assert tensors["pixel_values"].shape == (12, 3 * 2 * 14 * 14)


def test_ids_and_tensors_are_those_of_the_processor_of_transformers(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    folder = tiny_llava(tmp_path / "model")
    paths = [images["green"], images["wide"]]
    reference: Any = transformers.AutoProcessor.from_pretrained(folder)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and "}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "red."}]},
    ]
    text = reference.apply_chat_template(messages)
    assert text == f"<user>{LLAVA_IMAGE}and {LLAVA_IMAGE}<assistant>red.<eos>"
    expected = reference(text=text, images=[_image(path) for path in paths], return_tensors="pt")
    processor = _processor(folder)
    assert processor.expand(text, paths) == expected["input_ids"][0].tolist()
    tensors = processor.tensors(paths)
    assert tensors.keys() == {"pixel_values"}
    assert torch.equal(tensors["pixel_values"], expected["pixel_values"])


def _image(path: Path) -> Any:
    from PIL import Image

    return Image.open(path)


def test_a_text_needs_an_image_for_each_place(tmp_path: Path) -> None:
    images = write_images(tmp_path / "images")
    processor = _processor(tiny_llava(tmp_path / "model"))
    assert processor.expand("plain", []) == list(b"plain")
    with pytest.raises(ValueError, match="the text has 1 places for images, and 2 images"):
        processor.expand(LLAVA_IMAGE, [images["red"], images["red"]])


class WithoutToken:
    """Of a processor such as Janus's."""


def test_a_processor_without_a_token_of_images_matters_for_images_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment_core.models.images._load", lambda *_: WithoutToken())
    processor = _processor(tiny_llava(tmp_path / "model"))
    with pytest.raises(UserError, match="the processor of the llava model has no image_token_id"):
        processor.tensors([write_images(tmp_path / "images")["red"]])


def test_a_model_of_text_has_no_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ImageProcessor.of(tmp_path) is None
