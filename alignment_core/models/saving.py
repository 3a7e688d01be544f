"""Checkpoints as plain Hugging Face folders: safetensors, config, generation config, tokenizer and chat template."""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path
from typing import Any

from alignment_core.errors import UserError

ADAPTER = "adapter"
"""Folder of LoRA adapters in that of the model that they are merged into, until they are an output of their own."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def save_checkpoint(model: Any, source: Path | None, directory: Path, state_dict: dict[str, Any] | None = None) -> None:
    """Write ``model`` to ``directory`` so that ``transformers`` and vLLM load it unchanged.

    The tokenizer and generation config are copied from the folder ``source``, byte for byte. ``state_dict`` stands for
    the model's own weights where those are spread over ranks.
    """
    model.save_pretrained(directory, state_dict=state_dict)
    for name in TOKENIZER_FILES if source else ():
        if source and (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    _drop_provenance(directory / "config.json")


def _drop_provenance(config: Path) -> None:
    """``_name_or_path`` is a path of this machine: it has no place in content."""
    content = json.loads(config.read_text())
    content.pop("_name_or_path", None)
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def architecture_digest(directory: Path) -> str:
    """What must agree for one engine to serve both: config and tokenizer, but not the weights."""
    from alignment_core.canonical import digest_of, digest_of_file

    config = json.loads((directory / "config.json").read_text())
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    tokenizer = directory / "tokenizer.json"
    return digest_of([config, digest_of_file(tokenizer) if tokenizer.is_file() else ""])


def same_weights(a: Path, b: Path) -> bool:
    """Whether two checkpoints hold the same weights, byte for byte; False where they are cut into files differently."""
    names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (a, b)]
    return bool(names[0]) and names[0] == names[1] == filecmp.cmpfiles(a, b, names[0], shallow=False)[0]


def checkpoint_dtype(directory: Path) -> str:
    """The float type in which a checkpoint is stored, such as ``float32``. (vLLM's ``auto`` would round fp32 down.)"""
    config = json.loads((directory / "config.json").read_text())
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def check_loadable(directory: Path) -> Path:
    """The folder of a model, if all that loading it would read is plain data. Raises UserError otherwise.

    To read a pickle is to run what is in it, so weights are read from safetensors alone. And ``transformers`` takes a folder
    that holds an adapter's configuration for the adapter, and loads the model that this names instead.
    """
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no *.safetensors: pickled weights (*.bin, *.pt, *.pth, *.ckpt) are never loaded, because they "
            "can run code; convert them first"
        )
    if (directory / "adapter_config.json").is_file():
        raise UserError(
            f"{directory} is an adapter (adapter_config.json), and no model; name it as `model.adapter`, beside the model that "
            "it was trained on"
        )
    return directory
