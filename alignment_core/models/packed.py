"""A model seen through a packed micro-batch: lines of tokens go in, what a loss needs comes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from alignment_core.errors import UserError
from alignment_core.losses.logprobs import entropy, token_logps

if TYPE_CHECKING:
    from alignment_core.training.batches import MicroBatch

Head = Literal["lm", "score", "value"]
"""Next-token logits; one score per sequence, at its last token; or, of the same model, one at each place."""


class PackedModel(nn.Module):
    """Wraps a ``transformers`` model of either head; its forward gives [K] log-probabilities, [S] scores or [K] values.

    There is no attention mask: position ids that restart make ``transformers`` keep packed sequences apart. Only the
    places that predict a target reach the vocabulary projection, whatever else the model does to its logits.
    """

    def __init__(self, model: Any, head: Head, with_entropy: bool = False) -> None:
        """``with_entropy``, of a language model: the forward gives [2, K], log-probabilities and entropies in nats."""
        super().__init__()
        self.model = model
        self.head = head
        self.with_entropy = with_entropy
        self._chosen: Tensor | None = None
        if head == "lm":
            model.get_output_embeddings().register_forward_pre_hook(self._choose)

    def _choose(self, _module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """[L, W, H] hidden states → [1, K, H], those of the chosen places."""
        if self._chosen is None:
            return None
        return (arguments[0].flatten(0, 1)[self._chosen][None],)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, predict_K: Tensor, labels_K: Tensor, last_S: Tensor
    ) -> Tensor:
        if self.head == "lm":
            self._chosen = predict_K
            try:
                logits = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            finally:
                self._chosen = None
            logps_K = token_logps(logits[0], labels_K)
            return torch.stack([logps_K, entropy(logits[0])]) if self.with_entropy else logps_K
        backbone = self.model.base_model
        hidden = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        places = last_S if self.head == "score" else predict_K  # a value is that of the state before the token
        return self.model.score(hidden.flatten(0, 1)[places])[:, 0]


def run_packed(module: nn.Module, batch: MicroBatch) -> Tensor:
    """Call ``module`` (a :class:`PackedModel`, bare or within a DeepSpeed engine) on a micro-batch."""
    return module(batch.input_ids, batch.position_ids, batch.predict_K, batch.labels_K, batch.last_S)


def load_model(
    path: str, head: Head, dtype: torch.dtype, head_seed: int | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the Hugging Face folder ``path`` with a language-model or a one-score head.

    A score head that the folder does not hold is initialised from ``head_seed`` with standard deviation
    1/sqrt(hidden); without a seed such a folder is refused with UserError.
    """
    import transformers

    kind = transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    options: dict[str, Any] = {} if head == "lm" else {"num_labels": 1}
    model, info = kind.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    if head != "lm" and any(name.startswith("score") for name in info["missing_keys"]):
        if head_seed is None:
            raise UserError("the model that should score completions has no score head: it is no reward model")
        generator = torch.Generator().manual_seed(head_seed)
        weight = model.score.weight.data
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    return model
