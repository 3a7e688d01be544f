"""The processor of an image-text model's folder: ids of a text with images, and the tensors that its forward pass takes."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.errors import UserError
from alignment_core.models.load_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = ("processor_config.json", "preprocessor_config.json")
"""Files that name the kind of an image processor."""

CONFIG = "config.json"
TOKENS = ("image_token_id", "image_token_index", "boi_token_id", "boi_token_index")
"""Its names of the tokens at the places of images."""
BLANK = 56
"""Pixels of the side of a blank image."""


class ImageProcessor:
    """A ``transformers`` processor without its parts for videos and sounds, which need packages that images do not. It is
    loaded for the first image."""

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self._folder = folder
        self._trust_remote_code = trust_remote_code

    @functools.cached_property
    def _processor(self) -> Any:
        """Raises UserError for one that names no token of images."""
        processor = _load(self._folder, self._trust_remote_code)
        if getattr(processor, "image_token_id", None) is None:
            raise UserError(
                f"the processor of the {_read(self._folder / CONFIG)['model_type']} model has no image_token_id, the token at "
                "the places of images: leave the images out, or choose another image-text model"
            )
        return processor

    @functools.cached_property
    def image_token_id(self) -> int:
        """The token at the places of an image's features, of which each image has as many as its size needs."""
        return int(self._processor.image_token_id)

    @functools.cached_property
    def image_token_ids(self) -> tuple[int, ...]:
        """This and, in some kinds of models, the tokens around and within the features, such as ends of rows."""
        return tuple(getattr(self._processor, "image_token_ids", None) or [self.image_token_id])

    @functools.cached_property
    def placeholder(self) -> str:
        """The text that a chat template writes for an image, and that :meth:`expanded` replaces."""
        text: str = getattr(self._processor, "boi_token", None) or self._processor.image_token
        return text

    @functools.cached_property
    def configured_token_ids(self) -> frozenset[int]:
        """The tokens of images that config.json names, which a text without images cannot contain; without a processor."""
        config = _read(self._folder / CONFIG)
        return frozenset(token for name in TOKENS if isinstance(token := config.get(name), int))

    @classmethod
    def of(cls, folder: Path, trust_remote_code: bool = False) -> ImageProcessor | None:
        """The processor of a model's folder; None if the model reads no images, or has no processor."""
        config = folder / CONFIG
        if not (config.is_file() and _read(config).get("vision_config")):
            return None
        if not any((folder / name).is_file() for name in SETTINGS):
            return None
        return cls(folder, trust_remote_code)

    def expanded(self, text: str, images: Sequence[Path]) -> str:
        """``text`` with each placeholder replaced by the tokens of its image, as ``transformers`` does before it tokenizes.

        Raises ValueError unless the text has as many placeholders as there are images.
        """
        if (places := text.count(self.placeholder)) != len(images):
            raise ValueError(f"the text has {places} places for images, and {len(images)} images")
        if not images:
            return text
        output = self._processor(
            text=[text], images=[decoded(path) for path in images], return_text_replacement_offsets=True
        )
        expanded, end = "", 0
        for place in output["text_replacement_offsets"][0]:
            start, stop = place["span"]
            expanded += text[end:start] + place["replacement"]
            end = stop
        return expanded + text[end:]

    def expand(self, text: str, images: Sequence[Path], add_special_tokens: bool = False) -> list[int]:
        """The ids of ``text`` with ``images`` in the places of its placeholders: the ``input_ids`` of the processor's own call.

        By default without the tokenizer's own special tokens, which chat templates write themselves.
        """
        ids: list[int] = self._processor.tokenizer(
            self.expanded(text, images), add_special_tokens=add_special_tokens
        ).input_ids
        return ids

    def tensors(self, images: Sequence[Path]) -> dict[str, Tensor]:
        """What the model's forward pass takes for these images, one after the other: ``pixel_values`` and, by kind of model,
        ``image_grid_thw``, ``image_sizes``, …"""
        return self._of([decoded(path) for path in images])

    def blank(self) -> dict[str, Tensor]:
        """The tensors of a black image."""
        from PIL import Image

        return self._of([Image.new("RGB", (BLANK, BLANK))])

    def _of(self, images: Sequence[Any]) -> dict[str, Tensor]:
        return dict(self._processor.image_processor(images=images, return_tensors="pt"))


def _read(file: Path) -> dict[str, Any]:
    # Not by the module that saves models: no data set depends on that one.
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def decoded(path: Path) -> Any:
    """The picture in a file, upright and in RGB."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def _load(folder: Path, trust_remote_code: bool) -> Any:
    """The processor with its image processor and tokenizer alone."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = [folder / name for name in (*SETTINGS, "tokenizer_config.json")]
    settings = [_read(file) for file in files if file.is_file()]
    if trust_remote_code and any("AutoProcessor" in (part.get("auto_map") or {}) for part in settings):
        return transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    names = [part["processor_class"] for part in settings if part.get("processor_class")]
    kind = getattr(transformers, (names or [PROCESSOR_MAPPING_NAMES[_read(folder / CONFIG)["model_type"]]])[0])
    parts = {
        "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(folder),
        "tokenizer": lambda: load_tokenizer(folder, trust_remote_code),
    }
    arguments = [parts[name]() if name in parts else None for name in kind.get_attributes()]
    settings_of_kind, _ = kind.get_processor_dict(folder)
    return _without_other_parts(kind).from_args_and_dict(arguments, settings_of_kind)


def _without_other_parts(kind: Any) -> Any:
    """The class of a processor, which accepts None for its other parts."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return type(None) if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
