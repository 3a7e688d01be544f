"""Checkpoints as plain Hugging Face folders: safetensors, config, generation config, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from alignment_core.data.turn_end import PLAIN
from alignment_core.errors import UserError

ADAPTER = "adapter"
"""Folder of LoRA adapters within that of the merged model, until it becomes an output of its own."""
GENERATION_CONFIG = "generation_config.json"
WEIGHTS_INDEX = "model.safetensors.index.json"
"""Index of sharded weights."""
CHAT_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates that a tokenizer has beside its default one, such as ``tool_use``."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    CHAT_TEMPLATES,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",  # SentencePiece
    "*.tiktoken",
    "tekken.json",
)
"""Patterns of a tokenizer's files."""
CHAT_TEMPLATE_OF_PROCESSOR = "chat_template.json"
"""The chat template of a multimodal model's processor, in earlier versions of ``transformers``."""
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    CHAT_TEMPLATE_OF_PROCESSOR,
)
"""Settings of the images, videos and sounds of a multimodal model, without which vLLM does not start it."""
_AT_ONCE = 1 << 24
"""Weights that are compared at a time."""


def save_checkpoint(
    model: Any,
    source: Path | None,
    directory: Path,
    state_dict: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write ``model`` to ``directory`` so that ``transformers`` and vLLM load it unchanged.

    The tokenizer, the generation config, trusted code and a multimodal model's processor are copied from the folder ``source``,
    byte for byte. ``state_dict`` replaces the model's own weights where those are sharded over ranks; an empty one writes a
    model without weights.
    """
    with _generation_config_unchecked(model, directory):
        model.save_pretrained(directory, state_dict=state_dict)
    if source:
        code = ("*.py",) if trust_remote_code else ()
        processor = PROCESSOR_FILES if is_multimodal(read_json(directory / "config.json")) else ()
        copy_files(source, directory, (*TOKENIZER_FILES, GENERATION_CONFIG, *code, *processor))
    _drop_provenance(directory / "config.json")


def is_multimodal(shape: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json also reads images or sounds."""
    return any(shape.get(part) for part in ("vision_config", "audio_config"))


@contextmanager
def _generation_config_unchecked(model: Any, directory: Path) -> Iterator[None]:
    """Write the generation config of ``model`` as it is: ``save_pretrained`` raises for an inconsistent one."""
    if not model.can_generate():
        yield
        return
    config = model.generation_config
    model.generation_config = type(config)()
    try:
        yield
    finally:
        model.generation_config = config
    config.to_json_file(directory / GENERATION_CONFIG, keys_to_pop=["compile_config"])


def copy_files(source: Path, directory: Path, patterns: Sequence[str]) -> None:
    """Copy the files of the folder ``source`` that match one of the ``patterns``; those of subfolders into subfolders."""
    for path in (path for pattern in patterns for path in source.glob(pattern) if path.is_file()):
        target = directory / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def write_chat_template(directory: Path, template: str) -> None:
    """Make ``template`` the only chat template of the tokenizer in ``directory``, which has none with :data:`PLAIN`."""
    others = (directory / name for name in ("chat_template.jinja", CHAT_TEMPLATE_OF_PROCESSOR))
    for path in (*directory.glob(CHAT_TEMPLATES), *others):
        path.unlink(missing_ok=True)
    if template != PLAIN:
        (directory / "chat_template.jinja").write_text(template)
    content = read_json(directory / "tokenizer_config.json")
    content.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(content, indent=2))


def read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _drop_provenance(config: Path) -> None:
    """Remove ``_name_or_path``: a path of this machine would make equal models differ."""
    content = read_json(config)
    content.pop("_name_or_path", None)
    write_json(config, content)


def architecture_digest(directory: Path) -> str:
    """Digest of config, tokenizer, processor and stop tokens: an engine can switch between models with equal digests.

    vLLM stops at the tokens of the generation_config.json with which it started, whatever a request asks for.
    """
    from alignment_core.canonical import digest_of, digest_of_file
    from alignment_core.data.turn_end import eos_token_ids

    config = json.loads((directory / "config.json").read_text())
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    tokenizer = directory / "tokenizer.json"
    stop_ids = sorted(eos_token_ids(directory))
    processor = [digest_of_file(file) for name in PROCESSOR_FILES if (file := directory / name).is_file()]
    return digest_of([config, digest_of_file(tokenizer) if tokenizer.is_file() else "", stop_ids, *processor])


def weight_files(directory: Path) -> list[Path]:
    """The files of weights that ``transformers`` loads: ``model.safetensors``, else those of the index; none without either.

    Some repositories also hold a second copy of the weights, such as ``consolidated.safetensors``.
    """
    if (whole := directory / "model.safetensors").is_file():
        return [whole]
    if not (index := directory / WEIGHTS_INDEX).is_file():
        return []
    try:
        return sorted({directory / Path(name).name for name in read_json(index)["weight_map"].values()})
    except (ValueError, KeyError) as error:
        raise UserError(f"{index} cannot be read ({error!r}); copy or download it again") from None


NO_SAFETENSORS = (
    "has no *.safetensors: pickled weights are not loaded (*.bin, *.pt, *.pth, *.ckpt), because they can run code; "
    "convert them first"
)


def why_no_weights(directory: Path) -> str:
    """A clause for a folder that has no :func:`weight_files`."""
    if any(directory.glob("*.safetensors")):
        return f"has neither model.safetensors nor {WEIGHTS_INDEX}, which `transformers` loads"
    return NO_SAFETENSORS


def changed_weights(start: Path, result: Path) -> float | None:
    """Fraction of the weights in ``result`` that differ from those in ``start``, in the type in which ``result`` is stored.

    Weights that only one of them has, such as a new head, do not count. None if they have no weight in common. The files may be
    sharded differently; only a part of one weight is in memory at a time.
    """
    import torch
    from safetensors import safe_open

    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(file, framework="pt")) for file in weight_files(start)]
        before = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
        total = changed = 0
        for file in (opened.enter_context(safe_open(file, framework="pt")) for file in weight_files(result)):
            for name in file.keys() & before.keys():
                new = file.get_tensor(name).view(-1)
                old = before[name].get_tensor(name).view(-1)
                if old.shape != new.shape:
                    continue
                total += new.numel()
                for old_part, new_part in zip(old.split(_AT_ONCE), new.split(_AT_ONCE), strict=True):
                    changed += int(torch.count_nonzero(old_part.to(new.dtype) != new_part))
    return changed / total if total else None


def checkpoint_dtype(directory: Path) -> str:
    """The float type in which a checkpoint is stored, such as ``float32``. (vLLM's ``auto`` would round fp32 down.)"""
    return dtype_of(read_json(directory / "config.json"))


def dtype_of(shape: Mapping[str, Any]) -> str:
    """The float type that a ``config.json`` names, some of multimodal models in ``text_config``; float32 if it names none."""
    part = shape.get("text_config") or {}
    dtype = shape.get("dtype") or shape.get("torch_dtype") or part.get("dtype") or part.get("torch_dtype")
    return str(dtype or "float32").removeprefix("torch.")


def check_loadable(directory: Path) -> Path:
    """The folder of a model, if loading it reads only plain data. Raises UserError otherwise.

    Reading a pickle can run code, so weights are read from safetensors only. A folder with an adapter's configuration is
    refused, because ``transformers`` would load the model that the configuration names instead.
    """
    if not weight_files(directory):
        raise UserError(f"{directory} {why_no_weights(directory)}")
    if (directory / "adapter_config.json").is_file():
        raise UserError(
            f"{directory} is an adapter (adapter_config.json), and no model; name it as `model.adapter`, beside the model that "
            "it was trained on"
        )
    return directory
