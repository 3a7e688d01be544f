"""Stage: a LoRA adapter, from a folder, from the Hub or of the store, merged into the model that it was trained beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alignment_core.canonical import digest_of_file
from alignment_core.errors import UserError
from alignment_core.execution.base import Stage, StageConfig, StageContext, below
from alignment_core.models.adapters import NF4, QUANTISATION
from alignment_core.models.four_bits import round_to_4_bits
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes.paths import BEGINS, is_written_as_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What `peft` calls the files of an adapter."""
FILES = (CONFIG, WEIGHTS, QUANTISATION)


class MergeAdapterConfig(StageConfig):
    """Where the adapter comes from, pinned; it is the input ``adapter`` if it is of the store."""

    adapter: str
    files: dict[str, str] = {}
    """SHA-256 by file name, for a local folder."""
    commit: str | None = None
    """Commit on the Hub."""

    def content(self) -> Any:
        return {"hub": self.adapter if self.commit else None, "commit": self.commit, "files": self.files}


def pin_adapter(name: str, hint: str = "") -> MergeAdapterConfig:
    """Resolve where an adapter comes from: hash a local folder, or ask the Hub for the commit.

    Raises UserError, with the ``hint`` where there is no such adapter.
    """
    from alignment_core.data.hub import commit_of

    folder = Path(name).expanduser()
    if not is_written_as_path(name):
        return MergeAdapterConfig(adapter=name, commit=commit_of(name, None, "model", hint))
    if not folder.is_dir():
        raise UserError(f"model.adapter: {folder}: no such folder ({BEGINS})")
    if missing := [one for one in (CONFIG, WEIGHTS) if not (folder / one).is_file()]:
        raise UserError(f"model.adapter: {folder} has no {missing[0]}; give a folder as `peft` saves it")
    there = [one for one in FILES if (folder / one).is_file()]
    return MergeAdapterConfig(adapter=name, files={one: digest_of_file(folder / one) for one in there})


def run(context: StageContext, config: MergeAdapterConfig) -> dict[str, Any]:
    """Merged in fp32, and saved in the precision of the model."""
    import peft
    import torch

    from alignment_core.models.saving import checkpoint_dtype, save_checkpoint

    folder = _folder(context, config)
    for name, digest in config.files.items():
        if not (folder / name).is_file() or digest_of_file(folder / name) != digest:
            raise UserError(f"model.adapter: {folder / name} changed while the run was starting; run again")
    source = context.model("model")
    try:
        adapter = peft.PeftConfig.from_pretrained(str(folder))
        tensors = peft.load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # whatever its parsers raise for a broken file
        raise UserError(
            f"model.adapter: {config.adapter} cannot be read ({_first_line(error)}); copy it again"
        ) from None
    if not isinstance(adapter, peft.LoraConfig):
        raise UserError(f"model.adapter: {config.adapter} is of the kind {adapter.peft_type}; only LoRA's are merged")
    is_lm = adapter.task_type != "SEQ_CLS"
    model = source.load("lm" if is_lm else "score", torch.float32, head_seed=0)
    if _in_4bit(folder):
        stored = getattr(torch, checkpoint_dtype(source.path))
        round_to_4_bits(model, model.get_output_embeddings() if is_lm else model.score, stored)
    adapter.inference_mode, tied = True, model.config.tie_word_embeddings
    try:
        adapted = peft.get_peft_model(model, adapter)
        result = peft.set_peft_model_state_dict(adapted, tensors)
    except (RuntimeError, ValueError) as error:
        raise UserError(_not_beside(config, source.reference.short, _first_line(error))) from None
    known = adapted.state_dict(keep_vars=True)
    absent = [name for name in result.missing_keys if name in known and ("lora_" in name or "modules_to_save" in name)]
    if wrong := [*result.unexpected_keys, *absent]:
        raise UserError(_not_beside(config, source.reference.short, f"for example {wrong[0]}"))
    merged = adapted.merge_and_unload().to(getattr(torch, checkpoint_dtype(source.path)))
    if tied:
        _tie_again(merged)
    save_checkpoint(merged, source.path, context.output)
    return {"parameters": sum(one.numel() for one in merged.parameters())}


def _in_4bit(folder: Path) -> bool:
    """Whether the adapter was trained beside weights in 4 bits. Raises UserError for what cannot be repeated."""
    if not (folder / QUANTISATION).is_file():
        return False
    if (said := json.loads((folder / QUANTISATION).read_text())) != NF4:
        raise UserError(f"model.adapter: {folder / QUANTISATION} says {said}; only {NF4} can be repeated")
    return True


def _tie_again(model: Any) -> None:
    """Share embeddings and head as before `peft` parted them, unless the adapter trained them apart."""
    import torch

    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and torch.equal(head.weight, embeddings.weight):
        model.config.tie_word_embeddings = True
        model.tie_weights()


def _folder(context: StageContext, config: MergeAdapterConfig) -> Path:
    if ADAPTER in context.inputs:
        return _plain(context.inputs[ADAPTER])
    if config.commit is None:
        return Path(config.adapter).expanduser()
    import huggingface_hub

    folder = Path(huggingface_hub.snapshot_download(config.adapter, revision=config.commit, allow_patterns=[*FILES]))
    if missing := [one for one in (CONFIG, WEIGHTS) if not (folder / one).is_file()]:
        raise UserError(
            f"model.adapter: {config.adapter} has no {missing[0]} on the Hub; it is no adapter that `peft` saved"
        )
    return folder


def _plain(folder: Path) -> Path:
    """The folder of an adapter, if it has one that is no pickle, for which `peft` would look otherwise."""
    if missing := [one for one in (CONFIG, WEIGHTS) if not (folder / one).is_file()]:
        raise UserError(f"model.adapter: {folder} has no {missing[0]}; pickled adapters (*.bin) are never loaded")
    return folder


def _not_beside(config: MergeAdapterConfig, model: str, why: str) -> str:
    return f"model.adapter: {config.adapter} was not trained beside {model} ({why}); name the model that its {CONFIG} names"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


SHOWS = {"parameters": "parameters"}
STAGE = Stage(
    "merge_adapter",
    1,
    {"model": "model"},
    MergeAdapterConfig,
    run,
    SHOWS,
    code=below("alignment_core.models", "adapters four_bits saving"),
    packages=("peft", "torch", "transformers"),
)
