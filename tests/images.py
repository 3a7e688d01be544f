"""Tiny image-text models with random weights, as folders in the form of public ones, and images for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from alignment_core.models.tokenizer import byte_tokenizer

COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "yellow": (230, 220, 20)}
SIDE = 28
"""Pixels of an image's side: one token of the Qwen model, and four of the LLaVA model."""
TEMPLATE = (
    "{%- for message in messages -%}{{ '<' ~ message['role'] ~ '>' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ 'IMAGE' }}"
    "{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)
"""The chat template of the byte tokenizer, for contents in parts, too."""
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
LLAVA_IMAGE = "<image>"
GEMMA_IMAGE = "<start_of_image>"
VOCABULARY = 272
WIDE = {"initializer_range": 0.1}
"""Weights with which images and positions change probabilities by much more than rounding does."""


def write_images(folder: Path) -> dict[str, Path]:
    """PNG files of one colour each; ``wide``, which is twice as wide and has two colours, and ``large``, which is also twice as
    high and has all colours."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.png" for name in (*COLOURS, "wide", "large")}
    for name, colour in COLOURS.items():
        Image.new("RGB", (SIDE, SIDE), colour).save(paths[name])
    wide = Image.new("RGB", (2 * SIDE, SIDE), COLOURS["red"])
    wide.paste(COLOURS["blue"], (0, 0, SIDE // 2, SIDE))
    wide.save(paths["wide"])
    large = Image.new("RGB", (2 * SIDE, 2 * SIDE))
    for number, colour in enumerate(COLOURS.values()):
        x, y = SIDE * (number % 2), SIDE * (number // 2)
        large.paste(colour, (x, y, x + SIDE, y + SIDE))
    large.save(paths["large"])
    return paths


def tiny_qwen_vl(folder: Path, seed: int = 0, hidden_size: int = 64) -> Path:
    """A Qwen2.5-VL model; a 28×28 image is one token, a 56×28 image two."""
    tokenizer = _tokenizer(QWEN_IMAGE, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **_text(tokenizer, hidden_size),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": hidden_size,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            **WIDE,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    _write(config, tokenizer, folder, seed)
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": SIDE * SIDE, "longest_edge": 16 * SIDE * SIDE}
    )
    _write_processor(images, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", folder)
    return folder


def tiny_qwen2_vl(folder: Path) -> Path:
    """A Qwen2-VL model, with images as :func:`tiny_qwen_vl` has them."""
    tokenizer = _tokenizer(QWEN_IMAGE, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2VLConfig(
        text_config={
            **_text(tokenizer, 64),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        },
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, **WIDE},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    _write(config, tokenizer, folder, seed=0)
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": SIDE * SIDE, "longest_edge": 16 * SIDE * SIDE}
    )
    _write_processor(images, "Qwen2VLProcessor", "Qwen2VLImageProcessor", folder)
    return folder


def tiny_llava(folder: Path, seed: int = 0, hidden_size: int = 64) -> Path:
    """A LLaVA model of CLIP and Llama; an image is cut to 28×28 pixels, which are four tokens."""
    tokenizer = _tokenizer(LLAVA_IMAGE, LLAVA_IMAGE)
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_text(tokenizer, hidden_size)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": SIDE // 2,
            "projection_dim": 32,
            **WIDE,
        },
        image_token_index=tokenizer.convert_tokens_to_ids(LLAVA_IMAGE),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    _write(config, tokenizer, folder, seed)
    _rename(folder / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    _write_processor(images, "LlavaProcessor", "CLIPImageProcessor", folder)
    settings = {
        "image_token": LLAVA_IMAGE,
        "num_additional_image_tokens": 1,
        "patch_size": SIDE // 2,
        "processor_class": "LlavaProcessor",
        "vision_feature_select_strategy": "default",
    }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def tiny_qwen3(folder: Path, config: Any, **text: Any) -> Path:
    """A model of Qwen3-VL or of a later one, by the class of its configuration; images have the tokens of Qwen2.5-VL."""
    tokenizer = _tokenizer(QWEN_IMAGE, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    ids = tokenizer.convert_tokens_to_ids
    vision: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": SIDE // 2,
        "num_position_embeddings": 16,
        **WIDE,
    }
    if config is transformers.Qwen3VLConfig:
        vision["deepstack_visual_indexes"] = [0, 1]
    _write(
        config(
            text_config={**_text(tokenizer, 64), "head_dim": 32, **text},
            vision_config=vision,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        ),
        tokenizer,
        folder,
        seed=0,
    )
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": SIDE * SIDE, "longest_edge": 16 * SIDE * SIDE}
    )
    _write_processor(images, "Qwen3VLProcessor", "Qwen2VLImageProcessor", folder)
    return folder


def tiny_gemma3(folder: Path) -> Path:
    """A Gemma 3 model, in which the tokens of an image, four of 56×56 pixels, see each other."""
    names = {"image_token": "<image_soft_token>", "boi_token": GEMMA_IMAGE, "eoi_token": "<end_of_image>"}
    tokenizer = _tokenizer(GEMMA_IMAGE, *names.values())
    numbers = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    for name, value in {**names, **numbers}.items():
        setattr(tokenizer, name, value)
    config = transformers.Gemma3Config(
        text_config={**_text(tokenizer, 64), "head_dim": 32, "sliding_window": 16},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 2 * SIDE,
            "patch_size": SIDE // 2,
        },
        mm_tokens_per_image=4,
        image_token_id=numbers["image_token_id"],
        boi_token_index=numbers["boi_token_id"],
        eoi_token_index=numbers["eoi_token_id"],
        **WIDE,
    )
    _write(config, tokenizer, folder, seed=0)
    images = transformers.Gemma3ImageProcessorPil(size={"height": 2 * SIDE, "width": 2 * SIDE})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra_special_tokens": names}))
    return folder


def _tokenizer(image: str, *tokens: str) -> Any:
    tokenizer = byte_tokenizer(TEMPLATE.replace("IMAGE", image))
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    return tokenizer


def _text(tokenizer: Any, hidden_size: int) -> dict[str, Any]:
    """The configuration of a text model with heads of 32 numbers, which vLLM needs."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **WIDE,
    }


def _write(config: Any, tokenizer: Any, folder: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _rename(file: Path, prefix: str, name_of_public_models: str) -> None:
    """Of weights that ``transformers`` made itself: those of public models keep their names when they are saved again."""
    weights = {name.replace(prefix, name_of_public_models): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def _write_processor(images: Any, kind: str, image_kind: str, folder: Path) -> None:
    """Its settings under the names of public repositories, which do not depend on the packages of the machine."""
    images.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    settings = {**json.loads(file.read_text()), "processor_class": kind, "image_processor_type": image_kind}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True))
