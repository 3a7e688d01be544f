"""A reference to a model of a stage, as it travels to the processes that load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.artifacts.reference import Reference
from alignment_core.errors import UserError
from alignment_core.models.load_tokenizer import load_tokenizer
from alignment_core.models.quantization import why_not_changed
from alignment_core.models.saving import checkpoint_dtype, read_json

if TYPE_CHECKING:
    import torch

    from alignment_core.models.images import ImageProcessor
    from alignment_core.models.loading import Head
    from alignment_core.models.quantization import Bits


@dataclass(frozen=True)
class Model:
    """A verified folder with weights and a tokenizer. All code loads models by it, so that they load alike everywhere."""

    path: Path
    reference: Reference
    """Its artifact."""
    trust_remote_code: bool = False
    """Whether code in the folder may run (the recipe's ``model.trust_remote_code``)."""
    bits: Bits | None = None
    """Bits that its linear layers are quantized to, see :mod:`alignment_core.models.quantization`; None: they are not."""

    @property
    def dtype(self) -> str:
        """The float type in which it is stored, such as ``float32``."""
        return checkpoint_dtype(self.path)

    def check_changeable(self) -> None:
        """Raise UserError if its weights are stored quantized: such a model is neither trained nor merged."""
        if problem := why_not_changed(self.reference.short, read_json(self.path / "config.json")):
            raise UserError(problem)

    def tokenizer(self) -> Any:
        """Its tokenizer, as ``transformers`` loads it."""
        return load_tokenizer(self.path, self.trust_remote_code)

    def image_processor(self) -> ImageProcessor | None:
        """Its processor of images; None if it reads none."""
        from alignment_core.models.images import ImageProcessor

        return ImageProcessor.of(self.path, self.trust_remote_code)

    def load(self, head: Head, dtype: torch.dtype, head_seed: int | None = None, as_stored: bool = False) -> Any:
        """Its weights, see :func:`~alignment_core.models.loading.load_model`."""
        from alignment_core.models.loading import load_model
        from alignment_core.models.quantization import quantise

        model = load_model(str(self.path), head, dtype, head_seed, self.trust_remote_code, as_stored)
        if self.bits:
            quantise(model, model.get_output_embeddings() if head == "lm" else model.score, self.bits)
        return model
