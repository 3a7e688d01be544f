"""Images in the prompts of a vLLM engine. The token ids of a prompt hold the tokens of each image, as training has them."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.models.images import decoded

PLACE = re.compile(r"(image|video|audio)_token_(id|index)$")
"""Fields of a config.json with the token that stands at the place of an image, a video or a sound."""
CACHED_IMAGES = 16
"""Decoded images that stay in memory: the completions of a prompt follow each other."""
MODULES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
"""Modules of torchvision that modules of vLLM's models import, and use for videos alone."""
OPTIONS: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0, "audio": 0}}
"""Arguments of ``vllm.LLM`` for a model that reads images."""


def never_sampled(shape: Mapping[str, Any]) -> dict[int, float]:
    """Biases of vLLM's logits for a model with this config.json: tokens that stand at the places of images are not sampled,
    because a model fails to read one without its image. Empty for a model of text."""
    places = {number for name, number in shape.items() if PLACE.search(name) and isinstance(number, int)}
    return {token: float("-inf") for token in sorted(places)}


def without_torchvision(architectures: Sequence[str], workers: int = 1) -> None:
    """Let vLLM serve these models with images where torchvision is not installed: not every index has a build for CPUs.

    The modules of such models import torchvision, but only videos use it; ``transformers`` prepares images with Pillow.

    Raises EnvironmentFault for a model whose modules need more of it, and UserError for an engine of several ``workers``, which
    are processes that import these modules themselves.
    """
    from transformers import ProcessorMixin
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.utils import is_torchvision_available
    from transformers.video_processing_utils import VideoProcessorMixin

    if is_torchvision_available():
        return
    if workers > 1:
        raise UserError(
            "resources.tensor_parallel_size: without torchvision, an engine of a model that reads images has one worker; leave "
            "it out, or install torchvision"
        )
    from vllm import ModelRegistry

    check = ProcessorMixin.check_argument_for_proper_class

    def check_others(self: Any, name: str, argument: Any) -> Any:
        return None if isinstance(argument, VideoProcessorMixin) else check(self, name, argument)

    ProcessorMixin.check_argument_for_proper_class = check_others
    AutoVideoProcessor.from_pretrained = VideoProcessorMixin.from_pretrained  # has the settings, and processes no video
    for name in [name for name in architectures if name in ModelRegistry.models]:
        try:
            with _stand_in():
                kind = ModelRegistry.models[name].load_model_cls()
        except ImportError as error:
            raise EnvironmentFault(f"vLLM needs torchvision for a {name}: install it ({error})") from None
        ModelRegistry.register_model(name, kind)  # vLLM would import it in a process of its own to look at it


class _StandIn(ModuleType):
    """A module of torchvision without any function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []


@contextmanager
def _stand_in() -> Iterator[None]:
    """Modules in the place of torchvision's, for imports in the block."""
    modules = {name: _StandIn(name) for name in MODULES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def accept_expanded_prompts(llm: Any) -> None:
    """Let ``vllm.LLM`` accept prompts that hold all tokens of each image. By default a prompt has one placeholder per image,
    which vLLM expands."""
    processor = llm.llm_engine.renderer.mm_processor
    llm.reset_mm_cache()  # waits for vLLM's warm-up in a thread, whose prompts do not hold them

    def find(ids: list[int], updates: Any) -> tuple[list[int], Any]:
        return ids, processor._find_mm_placeholders(ids, updates)

    processor._apply_prompt_updates = find


_decoded = functools.lru_cache(CACHED_IMAGES)(decoded)


def prompt_of(ids: Sequence[int], images: Sequence[Path]) -> dict[str, Any]:
    """A prompt for vLLM, of token ids and the paths of its images, in the order of their tokens."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(ids)}
    if images:
        prompt["multi_modal_data"] = {"image": [_decoded(path) for path in images]}
    return prompt
