"""The numbers of a model that decide its cost, from its ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from alignment_core.checks.memory_needs import parameters
from alignment_core.errors import UserError
from alignment_core.inference.kv_cache import bytes_per_token


@dataclass(frozen=True)
class Architecture:
    """A language model. Counts are of parameters, without biases and norms."""

    parameters: int
    active: int
    """Those that each token is multiplied with: of a mixture of experts, those of the experts that it is sent to."""
    embedding: int
    """Those of the input embedding, which is read and not multiplied."""
    layers: int
    hidden: int
    vocabulary: int
    cache: int
    """Bytes of a token in the key-value cache in bf16, on one GPU."""
    shape: dict[str, Any]
    tower: int = 0
    """Parameters of the vision tower of an image-text model, without its projector; they are beside ``parameters``."""

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Architecture:
        """From the fields of ``config.json``. Raises UserError if they do not have the usual names."""
        inner = {**shape, **(shape.get("text_config") or {})}
        count = parameters(shape)
        cache = bytes_per_token(shape, 2)
        if not count or cache is None or inner.get("n_routed_experts"):  # of which some layers have none
            raise UserError(
                "--config: the model's config.json does not describe a decoder whose size is known here (hidden_size, "
                "num_hidden_layers, num_attention_heads, intermediate_size)"
            )
        experts = inner.get("num_local_experts") or inner.get("num_experts") or 1
        used = inner.get("num_experts_per_tok") or 1
        hidden, vocabulary = inner["hidden_size"], inner.get("vocab_size") or 0
        width = (inner.get("moe_intermediate_size") if experts > 1 else None) or inner["intermediate_size"]
        idle = 3 * hidden * width * (experts - used) * inner["num_hidden_layers"]
        tied = bool(inner.get("tie_word_embeddings"))
        return cls(
            parameters=count,
            active=count - idle,
            embedding=0 if tied else vocabulary * hidden,
            layers=inner["num_hidden_layers"],
            hidden=hidden,
            vocabulary=vocabulary,
            cache=cache,
            shape=shape,
            tower=_tower(shape.get("vision_config") or {}),
        )

    @property
    def key_values(self) -> float:
        """Width of the keys of a layer, which is that of its values."""
        return self.cache / (4 * self.layers)  # two bytes of each

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.vocabulary * self.hidden

    def of_rank(self, shards: int) -> float:
        """Parameters on each of so many ranks that share the linear layers; embedding and head are whole."""
        outer = self.head + self.embedding
        return outer + (self.parameters - outer) / shards

    def forward_flops(self, tokens: float, context: float, shards: int = 1) -> float:
        """Operations of a forward pass over so many tokens, each of which attends to ``context`` others on average: 2 for each
        multiplied parameter, and 4 · hidden size · context in each layer (Kaplan et al. 2020, table 1). Each of ``shards``
        ranks that share the layers computes the head for itself; the operations are those of all."""
        again = (shards - 1) * self.head
        return tokens * (2 * (self.active - self.embedding + again) + 4 * self.layers * self.hidden * context)


def _tower(vision: dict[str, Any]) -> int:
    """Parameters of a vision transformer, from ``vision_config``: in each layer 4·W² of attention and 2·W·I of the MLP, or
    3·W·I of a gated one, and the embedding of patches; 0 if the fields have other names, or if layers
    differ in size."""
    width = vision.get("embed_dim") or vision.get("hidden_size")
    layers = vision.get("depth") or vision.get("num_hidden_layers")
    if not (isinstance(width, int) and isinstance(layers, int)):
        return 0
    inner = vision.get("intermediate_size") or width * vision.get("mlp_ratio", 4)
    matrices = 3 if vision.get("hidden_act") == "silu" else 2
    side = vision.get("patch_size", 14)
    area = prod(side) if isinstance(side, list) else side * side
    patches = width * 3 * vision.get("temporal_patch_size", 1) * area
    return int(layers * (4 * width * width + matrices * width * inner) + patches)
