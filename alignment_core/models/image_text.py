"""Models that read images beside text: their classes in ``transformers``, and what the images of a micro-batch are to them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alignment_core.errors import UserError

if TYPE_CHECKING:
    from alignment_core.models.images import ImageProcessor

AXES = 3
"""Rotary axes of models that place an image's tokens in time, height and width."""
SEPARATE_FEATURES = ("gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
"""Kinds of models that give the features of each image by themselves; others have more than these, as Qwen3-VL."""
FEATURES = "mm_encoder_outputs"
"""Option of a forward pass: features of images in the place of their pixels."""
IMAGE = "image"
"""Name of the features of images in this option."""
GRID = "_grid_thw"
"""End of the names of tensors with the patches of each image in time, height and width."""
DEEPSTACK = "deepstack_features"
"""Features of several layers of the vision tower, for as many of the language model, in Qwen3-VL."""


def image_text_class(config: Mapping[str, Any]) -> Any:
    """The class of ``AutoModelForImageTextToText`` for a ``config.json``; None for a model of text, for one with its own code,
    and for one that takes images in another way than in the places of tokens, by cross attention or an encoder."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if not config.get("vision_config") or config.get("auto_map"):
        return None
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.get("model_type", ""))
    kind = getattr(transformers, name) if name else None
    return kind if hasattr(kind, "get_image_features") else None


@functools.cache
def with_score_head(images: Any) -> Any:
    """The class of an image-text model with a head ``score`` in the place of the language model's, of a kind for which
    ``transformers`` has none: it is made as those are that it has."""
    from transformers import PreTrainedModel, conversion_mapping
    from transformers.modeling_layers import GenericForSequenceClassification

    of_kind = [base for base in images.__mro__[1:] if issubclass(base, PreTrainedModel) and base is not PreTrainedModel]
    name = images.__name__.removesuffix("ForConditionalGeneration") + "ForSequenceClassification"
    # The names of weights in checkpoints are those of the language model.
    for known in (images.__name__, images.config_class.model_type):
        if names := conversion_mapping.get_checkpoint_conversion_mapping(known):
            conversion_mapping.register_checkpoint_conversion_mapping(name, names, overwrite=True)
            break
    return type(name, (GenericForSequenceClassification, of_kind[0]), {"__module__": __name__})


def vision_parameters(model: Any) -> list[nn.Parameter]:
    """The parameters of an image-text model outside of its language model and heads: the vision tower and the projector of its
    features; none of a model of text."""
    if not reads_images(model):
        return []
    base = model.base_model
    own = {id(parameter) for parameter in base.get_decoder().parameters()}
    return [parameter for parameter in base.parameters() if id(parameter) not in own]


def of_language_model(model: Any, names: Sequence[str]) -> list[str]:
    """The ``names`` of modules without those of an image-text model's vision tower and projector."""
    if not reads_images(model):
        return [*names]
    base = model.base_model
    places = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    of_base, of_decoder = places[id(base)], places[id(base.get_decoder())]
    return [name for name in names if name.startswith(of_decoder) or not name.startswith(of_base)]


def reads_images(model: Any) -> bool:
    """Whether a loaded model is an image-text model."""
    return hasattr(getattr(model, "base_model", model), "get_image_features")


def has_axes(model: Any) -> bool:
    """Whether the rotary positions of a model have several axes."""
    return hasattr(model.base_model, "get_rope_index")


def of_axes(model: Any, position_ids: Tensor) -> Tensor:
    """The positions of text [L, W] on all axes of a model, after those that separate sequences; as they are of one axis."""
    return position_ids.expand(1 + AXES, *position_ids.shape) if has_axes(model) else position_ids


class ImageInputs:
    """What an image-text model takes beside ids and positions in lines: tensors of images, and positions of their tokens."""

    def __init__(self, model: Any, load_processor: Callable[[], ImageProcessor | None]) -> None:
        """The processor is loaded for the first image."""
        self.model = model
        self._load_processor = load_processor
        parameters = inspect.signature(model.base_model.forward).parameters
        self._types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in parameters]

    @property
    def one_sequence_per_line(self) -> bool:
        """Whether each sequence of a micro-batch with images needs a line of its own: tokens of an image see each other, by a
        mask of whole lines."""
        return "token_type_ids" in self._types

    @functools.cached_property
    def processor(self) -> ImageProcessor:
        """Raises UserError if the model has none."""
        processor = self._load_processor()
        if processor is None:
            raise UserError(
                f"the folder of the {self.model.config.model_type} model has no processor (preprocessor_config.json), without "
                "which it reads no images: copy the processor's files of the original model into it"
            )
        return processor

    def options(self, images: tuple[str, ...], input_ids: Tensor) -> dict[str, Any]:
        """Options of the forward pass over lines of tokens [L, W] with these ``images``, in the order of their tokens in the
        lines. The features of an image that several sequences have, such as completions of one prompt, are computed once. In
        any case the forward pass computes them itself, after the embeddings of the tokens."""
        types = dict.fromkeys(self._types, self._are_of_images(input_ids).long())
        distinct = dict.fromkeys(images)
        if self.model.config.model_type in SEPARATE_FEATURES and len(distinct) < len(images):
            return {**types, **self._features([*distinct], [[*distinct].index(image) for image in images])}
        return {**types, **self._tensors(images)}

    def _tensors(self, images: Sequence[str]) -> dict[str, Tensor]:
        return self._moved(self.processor.tensors([Path(image) for image in images]))

    def _features(self, images: Sequence[str], places: list[int]) -> dict[str, Any]:
        """The features of the ``images`` at these ``places``, as options."""
        tensors = self._tensors(images)

        def compute() -> Any:
            output = self.model.base_model.get_image_features(**tensors, return_dict=True)
            features = output.pooler_output
            is_one = isinstance(features, Tensor)
            output.pooler_output = features[places] if is_one else [features[place] for place in places]
            return output

        grids = {name: tensor[places] for name, tensor in tensors.items() if name.endswith(GRID)}
        return {FEATURES: _Deferred(compute), **grids}

    def _are_of_images(self, input_ids: Tensor) -> Tensor:
        """Whether each token belongs to an image, as the processor's own call says."""
        return torch.isin(input_ids, torch.tensor(self.processor.image_token_ids, device=input_ids.device))

    def _moved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of images on the model's device, numbers in its type."""
        device, dtype = self.model.device, self.model.dtype
        return {
            name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            for name, tensor in tensors.items()
        }

    def axes(self, options: Mapping[str, Any], input_ids: Tensor, used: Tensor) -> Tensor:
        """Positions of the tokens of sequences [S, T], one in each line, on all axes of a model that has several, [3, S, T];
        ``used`` [S, T] is 0 for padding. ``options``: those of their images, in this order."""
        grids = {name: tensor for name, tensor in options.items() if name.endswith(GRID)}
        types = self._are_of_images(input_ids).int()
        positions: Tensor = self.model.base_model.get_rope_index(
            input_ids, mm_token_type_ids=types, attention_mask=used, **grids
        )[0]
        return positions

    @contextmanager
    def with_blank_image(self) -> Iterator[None]:
        """Let a forward pass without images add :meth:`zero_from_blank_image` to the embeddings of its tokens: ranks with and
        without images then call the same modules in the same order, and their gradients arrive in one order, too."""

        def add(_module: nn.Module, _arguments: Any, embeddings: Tensor) -> Tensor:
            return embeddings + self.zero_from_blank_image().to(embeddings.dtype)

        # After the hooks of DeepSpeed, which has then released the weights of the embeddings, as before real images.
        hook = self.model.base_model.get_input_embeddings().register_forward_hook(add)
        try:
            yield
        finally:
            hook.remove()

    def zero_from_blank_image(self) -> Tensor:
        """0, from the features of a blank image."""
        output = self.model.base_model.get_image_features(**self._moved(self._blank), return_dict=True)
        return _sum([output.pooler_output, getattr(output, DEEPSTACK, None)]) * 0

    @functools.cached_property
    def _blank(self) -> dict[str, Tensor]:
        return self.processor.blank()


class _Deferred(dict[str, Any]):
    """Features of images that a forward pass computes when it looks for them, which is after the embeddings of the tokens."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute

    def get(self, name: str, default: Any = None) -> Any:
        if name == IMAGE and name not in self:
            self[name] = self._compute()
        return super().get(name, default)


def _sum(features: Tensor | Sequence[Any]) -> Tensor:
    """The sum of all numbers in the features of images, of which some kinds have lists."""
    if isinstance(features, Tensor):
        return features.float().sum()
    return torch.stack([_sum(part) for part in features if part is not None]).sum()
