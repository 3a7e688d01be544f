"""Stage: merge a LoRA adapter from a folder, the Hub, an address or the store into its base model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from alignment_core.canonical import digest_of_file
from alignment_core.data.addresses import RemoteFile, download, pinned_folder
from alignment_core.errors import AlignmentError, UserError, first_line
from alignment_core.evaluation.files import SPREAD
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.models.adapters import QUANTISATION, QUANTISATIONS
from alignment_core.models.eos_token import set_eos_token
from alignment_core.models.load_tokenizer import keep_tokenizer_json, load_tokenizer
from alignment_core.models.padding import set_padding
from alignment_core.models.quantization import Bits, round_weights
from alignment_core.models.saved_stop_tokens import stop_at_turn_end
from alignment_core.models.saving import (
    ADAPTER,
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    checkpoint_dtype,
    copy_files,
    save_checkpoint,
    write_chat_template,
)
from alignment_core.models.template_kwargs import set_template_kwargs
from alignment_core.recipes.paths import BEGINS, is_address, is_written_as_path

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of an adapter's files in `peft`."""
FILES = (CONFIG, WEIGHTS, QUANTISATION, *TOKENIZER_FILES, GENERATION_CONFIG, SPREAD)
"""Patterns of the files that are read: the adapter, and its tokenizer, chat templates and statistics if it has them."""


class MergeAdapterConfig(StageConfig):
    """The pinned origin of the adapter; an adapter in the store is the input ``adapter``."""

    adapter: str
    files: dict[str, str] = {}
    """SHA-256 by file name, for a local folder."""
    commit: str | None = None
    """Commit on the Hub."""
    remote: dict[str, RemoteFile] = Field(default_factory=dict, exclude_if=lambda files: not files)
    """Files at an address, by name."""
    chat_template: str | None = None
    """The recipe's chat template, which replaces the adapter's."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, exclude_if=lambda kwargs: not kwargs)
    """Arguments of the chat template."""
    eos_token: str | None = Field(None, exclude_if=lambda token: token is None)
    """The recipe's end of sequence, which replaces the tokenizer's."""

    def content(self) -> Any:
        hub = self.adapter if self.commit else None
        versions = {name: [file.version, file.size] for name, file in self.remote.items()}
        remote = {"remote": versions} if versions else {}
        kwargs = {"chat_template_kwargs": self.chat_template_kwargs} if self.chat_template_kwargs else {}
        eos = {"eos_token": self.eos_token} if self.eos_token else {}
        shown = {"chat_template": self.chat_template, **kwargs, **eos}
        return {"hub": hub, "commit": self.commit, "files": self.files, **shown, **remote}


def pin_adapter(name: str, hint: str = "") -> MergeAdapterConfig:
    """Pin the origin of an adapter: digests of a local folder's files, a commit on the Hub, or versions at an address.

    Raises UserError, with the ``hint`` if there is no such adapter.
    """
    from alignment_core.data.hub import commit_of

    folder = Path(name).expanduser()
    if is_address(name):
        return MergeAdapterConfig(adapter=name, remote=_at_address(name))
    if not is_written_as_path(name):
        return MergeAdapterConfig(adapter=name, commit=commit_of(name, None, "model", hint))
    if not folder.is_dir():
        raise UserError(f"model.adapter: {folder}: no such folder ({BEGINS})")
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise UserError(f"model.adapter: {folder} has no {missing[0]}; give a folder as `peft` saves it")
    paths = [path for pattern in FILES for path in folder.glob(pattern) if path.is_file()]
    return MergeAdapterConfig(
        adapter=name, files={path.relative_to(folder).as_posix(): digest_of_file(path) for path in paths}
    )


def _at_address(address: str) -> dict[str, RemoteFile]:
    try:
        files = pinned_folder(address, FILES)
    except AlignmentError as error:
        raise type(error)(f"model.adapter: {error}") from error
    if missing := [name for name in (CONFIG, WEIGHTS) if name not in files]:
        raise UserError(
            f"model.adapter: {address} has no {missing[0]}; give the address of a folder as `peft` saves it"
        )
    return files


def run(context: StageContext, config: MergeAdapterConfig) -> dict[str, Any]:
    """Merge in fp32, and save in the precision of the model, with the adapter's tokenizer if it has one."""
    import peft
    import torch

    folder = _folder(context, config)
    for name, digest in config.files.items():
        if not (folder / name).is_file() or digest_of_file(folder / name) != digest:
            raise UserError(f"model.adapter: {folder / name} changed while the run was starting; run again")
    source = context.model("model")
    source.check_changeable()
    try:
        adapter = peft.PeftConfig.from_pretrained(str(folder))
        tensors = peft.load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # the parsers of peft raise many types for a broken file
        raise UserError(
            f"model.adapter: {config.adapter} cannot be read ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(adapter, peft.LoraConfig):
        raise UserError(f"model.adapter: {config.adapter} is of the kind {adapter.peft_type}; only LoRA's are merged")
    is_lm = adapter.task_type != "SEQ_CLS"
    model = source.load("lm" if is_lm else "score", torch.float32, head_seed=0)
    if bits := _base_bits(folder):
        stored = getattr(torch, checkpoint_dtype(source.path))
        round_weights(model, model.get_output_embeddings() if is_lm else model.score, stored, bits)
    adapter.inference_mode = True
    tied = model.config.tie_word_embeddings
    try:
        _fit_embeddings(model, tensors)
        adapted = peft.get_peft_model(model, adapter)
        result = peft.set_peft_model_state_dict(adapted, tensors)
    except (RuntimeError, ValueError) as error:
        raise UserError(_not_beside(config, source.reference.short, first_line(error))) from None
    known = adapted.state_dict(keep_vars=True)
    absent = [name for name in result.missing_keys if name in known and ("lora_" in name or "modules_to_save" in name)]
    if wrong := [*result.unexpected_keys, *absent]:
        raise UserError(_not_beside(config, source.reference.short, f"for example {wrong[0]}"))
    if tied:
        _untie(model)
    merged = adapted.merge_and_unload()
    _convert(merged, getattr(torch, checkpoint_dtype(source.path)))
    if tied:
        _tie_again(merged)
    save_checkpoint(merged, source.path, context.output, trust_remote_code=source.trust_remote_code)
    _adopt_tokenizer(config, folder, context.output, source.trust_remote_code)
    if is_lm:
        stop_at_turn_end(context.output, trust_remote_code=source.trust_remote_code)
    else:
        set_padding(context.output, source.trust_remote_code)
    return {"parameters": sum(parameter.numel() for parameter in merged.parameters())}


def _convert(model: Any, dtype: torch.dtype) -> None:
    """Convert the weights to ``dtype``, but for those that ``transformers`` keeps in fp32 beside others in ``dtype``: biases of
    a router's choice are close to each other, and rounded ones would choose other experts."""
    patterns = [name.replace("*", ".*") for name in model._get_dtype_plan(dtype)]  # as `from_pretrained` reads them
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.to(dtype)


def _adopt_tokenizer(config: MergeAdapterConfig, folder: Path, output: Path, trust_remote_code: bool) -> None:
    """Replace the tokenizer and chat templates of the base model by those of the adapter in ``folder``, if it has them.

    Raises UserError if the embeddings have too few rows for tokens that the adapter added. Base models may have such tokens,
    too (Gemma 3 of 1B: that of images), which no row of text has.
    """
    own = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
    of_base = load_tokenizer(output, trust_remote_code).get_vocab() if own else {}
    if (folder / "tokenizer_config.json").is_file():
        for path in [path for pattern in TOKENIZER_FILES for path in output.glob(pattern)]:
            path.unlink()
    copy_files(folder, output, (*TOKENIZER_FILES, GENERATION_CONFIG, SPREAD))
    keep_tokenizer_json(output)
    if config.chat_template is not None:
        write_chat_template(output, config.chat_template)
    set_template_kwargs(output, config.chat_template_kwargs)
    set_eos_token(output, config.eos_token, trust_remote_code)
    if not own:
        return
    vocabulary = load_tokenizer(output, trust_remote_code).get_vocab()
    shape = json.loads((output / "config.json").read_text())
    rows = shape.get("text_config", shape)["vocab_size"]
    if any(number >= rows and of_base.get(token) != number for token, number in vocabulary.items()):
        tokens = max(vocabulary.values()) + 1
        raise UserError(
            f"model.adapter: the tokenizer of {config.adapter} has {tokens} tokens, but the merged model has embeddings for "
            f"{rows}: save the adapter with its embeddings (`save_embedding_layers=True`)"
        )


def _fit_embeddings(model: Any, tensors: dict[str, Any]) -> None:
    """Resize the embeddings of ``model`` to those in the adapter's ``tensors``, for tokens that were added before training."""
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
    names = [name for name, module in model.named_modules() if module in embeddings]
    ends = tuple(f".{name}.{weight}" for name in names for weight in ("weight", "base_layer.weight"))
    rows = {len(tensor) for name, tensor in tensors.items() if name.endswith(ends)}
    if rows and rows != {model.get_input_embeddings().num_embeddings}:
        model.resize_token_embeddings(max(rows), mean_resizing=False)


def _untie(model: Any) -> None:
    """Copy the head's weights: `peft` merges in place, so a change of the embeddings would also change a tied head.

    A head that the adapter contains as a whole (`modules_to_save`, `trainable_token_indices`) is left unchanged.
    """
    import torch

    head = model.get_output_embeddings()
    head = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    if isinstance(head, torch.nn.Linear):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _base_bits(folder: Path) -> Bits | None:
    """Bits of the weights that the adapter was trained beside; None: they were not quantised. Raises UserError for an
    unsupported quantisation."""
    if not (folder / QUANTISATION).is_file():
        return None
    settings = json.loads((folder / QUANTISATION).read_text())
    for bits, supported in QUANTISATIONS.items():
        if settings == supported:
            return bits
    known = " and ".join(map(str, QUANTISATIONS.values()))
    raise UserError(f"model.adapter: {folder / QUANTISATION} has {settings}; only {known} are supported")


def _tie_again(model: Any) -> None:
    """Tie embeddings and head again, unless the adapter made them differ."""
    import torch

    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    if head is not None and torch.equal(head.weight, embeddings.weight):
        model.config.tie_word_embeddings = True
        model.tie_weights()


def _folder(context: StageContext, config: MergeAdapterConfig) -> Path:
    if ADAPTER in context.inputs:
        return _plain(context.inputs[ADAPTER])
    if config.remote:
        download(config.remote, context.progress / "adapter")
        return context.progress / "adapter"
    if config.commit is None:
        return Path(config.adapter).expanduser()
    import huggingface_hub

    folder = Path(huggingface_hub.snapshot_download(config.adapter, revision=config.commit, allow_patterns=[*FILES]))
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise UserError(
            f"model.adapter: {config.adapter} has no {missing[0]} on the Hub; it is no adapter saved by `peft`"
        )
    return folder


def _plain(folder: Path) -> Path:
    """The folder, if it has weights in safetensors; without these `peft` would load a pickle."""
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise UserError(f"model.adapter: {folder} has no {missing[0]}; pickled adapters (*.bin) are never loaded")
    return folder


def _not_beside(config: MergeAdapterConfig, model: str, why: str) -> str:
    return f"model.adapter: {config.adapter} was not trained beside {model} ({why}); name the model that its {CONFIG} names"


SHOWS = {"parameters": "parameters"}
STAGE = Stage(
    "merge_adapter",
    1,
    {"model": "model"},
    MergeAdapterConfig,
    run,
    SHOWS,
    packages=("jinja2", "peft", "torch", "transformers"),
)
