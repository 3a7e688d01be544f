"""Loading the weights of a Hugging Face folder with a language-model, score or value head."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch

from alignment_core.errors import UserError
from alignment_core.models.image_text import image_text_class, with_score_head
from alignment_core.models.saving import check_loadable, checkpoint_dtype, is_multimodal, read_json

log = logging.getLogger(__name__)
SHOWN = 5
"""Names of weights that a message lists."""
SCALES = ("_scale", "_scale_inv")
"""Ends of the names of scales beside quantized weights."""
Head = Literal["lm", "score", "value"]
"""``lm``: next-token logits; ``score``: one score per sequence, at its last token; ``value``: a score at each place."""


def load_model(
    path: str,
    head: Head,
    dtype: torch.dtype,
    head_seed: int | None = None,
    trust_remote_code: bool = False,
    as_stored: bool = False,
) -> Any:
    """Load the Hugging Face folder ``path`` with a language-model or a one-score head, in ``dtype``.

    With ``as_stored`` all but the head of scores stay in the type in which they are stored: then they are pages of the files.

    A missing head is initialised from ``head_seed``. That of scores, of which only differences count, has the standard
    deviation 1/sqrt(hidden) (Stiennon et al. 2020). That of values has 1/(hidden + 1) (OpenRLHF 0.11): the last hidden
    states of pretrained models have norms of tens, and a larger head would give a critic noise above the returns.
    Raises UserError for a missing head without a seed, for a classifier with several labels or a head of another name than
    ``score``, for pickled weights, for other missing weights, which `transformers` would initialise with only a warning, and
    for parts of a head of scores and scales that it would leave out.
    """
    kind = _class_of(Path(path), head)
    options: dict[str, Any] = {} if head == "lm" else {"num_labels": 1}
    model, info = kind.from_pretrained(
        check_loadable(Path(path)),
        dtype=getattr(torch, checkpoint_dtype(Path(path))) if as_stored else dtype,
        attn_implementation=None,  # sdpa, or eager where a model does not support that, as gpt-oss with its sinks
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are an error below
        **options,
    )
    if head != "lm" and not hasattr(model, "score"):
        raise UserError(
            f"the model is loaded as a {type(model).__name__}, which has no head `score`: it is not a reward model"
        )
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"the model has weights {name} of the shape {list(stored)} instead of {list(wanted)}")
    missing = sorted(name for name in info["missing_keys"] if head == "lm" or not name.startswith("score"))
    if missing:
        raise UserError(f"the weights of the model lack {_listed(missing)}, which its config.json says it has")
    unused = sorted(name for name in info["unexpected_keys"] if name.endswith(SCALES) or _is_of_scores(name, head))
    if unused:
        raise UserError(f"the weights of the model have {_listed(unused)}, without which it would be another model")
    if head != "lm":
        model.score.to(dtype)
    if head != "lm" and info["missing_keys"]:
        if head_seed is None:
            raise UserError("the model that should score completions has no score head: it is not a reward model")
        generator = torch.Generator().manual_seed(head_seed)
        weight = model.score.weight.data
        hidden = weight.shape[1]
        deviation = 1 / (hidden + 1) if head == "value" else hidden**-0.5
        weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # sdpa leaves out the soft cap of Gemma 2
    if is_text_part(model, Path(path)):
        log.warning(
            "the model also reads images or sounds: only the part that reads text is loaded, and saved after training"
        )
    return model


def _class_of(folder: Path, head: Head) -> Any:
    """The class of ``transformers`` that loads the model of a folder with this head, an image-text model as a whole."""
    import transformers

    images = image_text_class(read_json(folder / "config.json"))
    if images is None:
        return transformers.AutoModelForCausalLM if head == "lm" else transformers.AutoModelForSequenceClassification
    if head == "lm":
        return images
    if images.config_class in transformers.AutoModelForSequenceClassification._model_mapping:
        return transformers.AutoModelForSequenceClassification
    return with_score_head(images)


def is_text_part(model: Any, folder: Path) -> bool:
    """Whether ``model`` is only the part for text of the multimodal one in ``folder``: for some kinds of models, such as
    Mllama, ``AutoModelForCausalLM`` loads no more."""
    return is_multimodal(read_json(folder / "config.json")) and not is_multimodal(model.config.to_dict())


def _is_of_scores(name: str, head: Head) -> bool:
    """Whether a weight belongs to a head of scores, which is a single matrix here."""
    return head != "lm" and name.startswith("score.")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
