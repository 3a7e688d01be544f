"""The models whose linear layers several ranks can share, by their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignment_core.recipes import TrainingConfig

FIELD = "resources.trainer_tensor_parallel_size"
FAMILIES = (
    *("gemma", "gemma2", "gemma3_text", "gpt_neox", "granite", "llama", "mistral"),
    *("phi", "qwen2", "qwen3", "smollm3", "starcoder2"),
)
"""Values of ``model_type`` for which tests show that several ranks compute what one does."""
SHARED = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "intermediate_size": "units of its feed-forward layers",
}
"""Numbers of a model that the ranks share evenly."""


def why_not_split(shape: Mapping[str, Any], ranks: int) -> str | None:
    """Why so many ranks cannot share the linear layers of a model with this ``config.json``; None if they can, or if that is
    not known."""
    if shape.get("quantization_config"):
        return "its weights are stored quantized"
    if shape.get("vision_config") or shape.get("audio_config"):
        return "no test shows how a model that reads images or sounds is split"
    shape = shape.get("text_config") or shape
    family = shape.get("model_type") or shape.get("architecture")
    if family and family not in FAMILIES:
        return f"no test shows how a {family} model is split; those of the types {', '.join(FAMILIES)} are"
    for field, name in SHARED.items():
        count = shape.get(field)
        if count and count % ranks:
            return f"its {count} {name} cannot be shared evenly by {ranks} ranks"
    return None


def why_not_trained_in_parts(
    training: TrainingConfig, zero_stage: int | None, dropout: bool, zero_field: str = "resources.zero_stage"
) -> str | None:
    """Why the layers of a model cannot be shared in this training; None if they can. ``dropout``: whether the model's own is
    on. ``zero_stage``, of this field of the recipe: None for the default."""
    if training.lora:
        return "adapters are not split: leave out training.lora, or set it to 1"
    if training.optimizer != "adamw":
        return f"the optimizer {training.optimizer!r} needs whole matrices: use `adamw`, or set it to 1"
    if training.bf16 and zero_stage == 0:  # its norm leaves out the parts of all ranks but one
        return f"DeepSpeed clips gradients wrongly in bf16 without ZeRO: set {zero_field} to 1 or 2, or set it to 1"
    if dropout:
        return "each rank would leave out other numbers: set disable_dropout to true, or set it to 1"
    return None
