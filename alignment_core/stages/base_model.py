"""Stage: import the base model into the store from the Hub, a folder or an address, or create it from scratch."""

from __future__ import annotations

import difflib
import functools
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.reference import POINTER
from alignment_core.canonical import digest_of_file
from alignment_core.data.addresses import RemoteFile, download, pinned_folder
from alignment_core.errors import AlignmentError, UserError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.heartbeat import listener
from alignment_core.models.eos_token import set_eos_token
from alignment_core.models.load_tokenizer import keep_tokenizer_json
from alignment_core.models.saving import (
    CHAT_TEMPLATES,
    NO_SAFETENSORS,
    WEIGHTS_INDEX,
    weight_files,
    why_no_weights,
    write_chat_template,
)
from alignment_core.models.template_kwargs import set_template_kwargs
from alignment_core.recipes import ModelConfig
from alignment_core.recipes.paths import BEGINS, is_address, is_written_as_path

_DIGEST = re.compile(r"([a-z][a-z0-9_-]*@sha256:)?[0-9a-f]{4,64}")
"""A reference, in full or its first digits; no name on the Hub has this form."""
WANTED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
CODE = ("*.py",)
"""Copied only if the recipe trusts the model's code."""


class BaseModelConfig(StageConfig):
    """A model with a pinned origin: equal configurations mean equal weights."""

    model: ModelConfig
    files: dict[str, str] = {}
    """SHA-256 by file name, for a local folder."""
    commit: str | None = None
    """Commit on the Hub."""
    remote: dict[str, RemoteFile] = Field(default_factory=dict, exclude_if=lambda files: not files)
    """Files at an address, by name."""

    def content(self) -> Any:
        model = self.model.model_dump(mode="json", exclude={"name", "revision"})
        hub_name = self.model.name if self.commit else None
        versions = {name: [file.version, file.size] for name, file in self.remote.items()}
        remote = {"remote": versions} if versions else {}
        return {**model, "hub": hub_name, "commit": self.commit, "files": self.files, **remote}

    def packages_used(self) -> tuple[str, ...]:
        if self.model.scratch:
            return ("tokenizers", "torch", "transformers")
        return ("tokenizers", "transformers") if self.model.eos_token else ()


def run(context: StageContext, config: BaseModelConfig) -> dict[str, Any]:
    from alignment_core.models.scratch import create_model

    model = config.model
    if model.scratch is not None:
        parameters = create_model(model.scratch, model.chat_template, context.seed, context.output)
        set_template_kwargs(context.output, model.chat_template_kwargs)
        set_eos_token(context.output, model.eos_token)
        return {"parameters": parameters}
    if config.remote:
        source = context.progress / "model"  # files that were complete before a restart are not sent again
        download(config.remote, source)
    else:
        source = Path(str(model.name)).expanduser() if config.commit is None else _download(model, config.commit)
    for name, path in _files(source, model).items():
        (context.output / name).parent.mkdir(exist_ok=True)
        (shutil.move if config.remote else shutil.copyfile)(path, context.output / name)
    for name, digest in config.files.items():
        if not (context.output / name).is_file() or digest_of_file(context.output / name) != digest:
            raise UserError(f"model: {source / name} changed while the run was starting; run again")
    check_weights(context.output, source)
    _tidy(context.output, model)
    return {"parameters": _parameters(context.output)}


def _files(folder: Path, model: ModelConfig) -> dict[str, Path]:
    """The files of a model's folder that are copied, by their paths in it: weights, and the files beside them.

    Raises UserError if weights are missing.
    """
    weights = weight_files(folder)
    if not weights:
        raise UserError(f"model: {folder} {why_no_weights(folder)}")
    if missing := [path for path in weights if not path.is_file()]:
        raise UserError(f"model: {missing[0]} is missing, which {WEIGHTS_INDEX} names; copy or download it again")
    paths = {path for pattern in _patterns(model) for path in folder.glob(pattern) if path.is_file()}
    paths.discard(folder / POINTER)  # the master weights may be in another store
    if weights[0].name == "model.safetensors":
        paths.discard(folder / WEIGHTS_INDEX)
    return {path.relative_to(folder).as_posix(): path for path in sorted({*paths, *weights})}


def _patterns(model: ModelConfig) -> tuple[str, ...]:
    """Patterns of the files beside the weights."""
    templates = () if model.chat_template else (CHAT_TEMPLATES,)
    return WANTED + templates + (CODE if model.trust_remote_code else ())


def _tidy(directory: Path, model: ModelConfig) -> None:
    """Check that there is a tokenizer, and write the recipe's chat template if it has one."""
    for needed in ("config.json", "tokenizer_config.json"):
        if not (directory / needed).is_file():
            raise UserError(
                f"model: {model.name} has no {needed}; a Hugging Face model folder with its tokenizer is needed"
            )
    keep_tokenizer_json(directory)
    if model.chat_template is not None:
        write_chat_template(directory, model.chat_template)
    set_template_kwargs(directory, model.chat_template_kwargs)
    set_eos_token(directory, model.eos_token, model.trust_remote_code)


def _download(model: ModelConfig, commit: str) -> Path:
    import huggingface_hub

    beat = listener()

    class Bar(huggingface_hub.utils.tqdm):
        """The client updates bars as bytes arrive, from several threads; they are not shown."""

        def update(self, n: float | None = 1) -> bool | None:
            beat()
            return super().update(n)

    return Path(
        huggingface_hub.snapshot_download(
            str(model.name),
            revision=commit,
            tqdm_class=Bar,
            allow_patterns=["*.safetensors", *_patterns(model)],
            ignore_patterns=["consolidated*", "*/*.safetensors"],
        )
    )


def check_weights(directory: Path, named: Path | None = None) -> None:
    """Raise UserError for the first file of weights that is truncated or invalid; ``named`` is the folder of its origin."""
    from safetensors import SafetensorError, safe_open

    for path in weight_files(directory):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            where = (named or directory) / path.name
            raise UserError(
                f"model: {where}: is not a complete safetensors file ({error}); copy or download it again"
            ) from None


def _parameters(directory: Path) -> int:
    from safetensors import safe_open

    total = 0
    for path in weight_files(directory):
        with safe_open(path, framework="numpy") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (no mapping)
    return total


def in_store(
    store: Store, model: ModelConfig, kinds: Sequence[str] = ("model",), field: str = "model"
) -> Reference | None:
    """The artifact that a recipe's ``model`` names by reference or tag, or None; ``field`` is the field's path.

    Raises UserError if the store has no such artifact, or one of another kind.
    """
    name = model.name or ""
    known = None
    if name and not is_written_as_path(name):
        known = store.tags.all().get(name)
        try:
            known = store.resolve(name) if known is None and _DIGEST.fullmatch(name) else known
        except UserError as error:
            raise UserError(f"{field}: {error}") from None
    if known is not None and known.kind not in kinds:
        raise UserError(f"{field}: {name} names a {known.kind}; the required kind is {' or '.join(kinds)}")
    if known is not None:
        _check_no_revision(model, f"{name} is an artifact")
    for setting in ("chat_template", "chat_template_kwargs", "eos_token") if known is not None else ():
        if getattr(model, setting):
            raise UserError(
                f"model.{setting}: {name} is an artifact, which has its own tokenizer and chat template; leave the field out, "
                "or give the model's folder instead"
            )
    return known


def _check_no_revision(model: ModelConfig, why: str) -> None:
    if model.revision is not None:
        raise UserError(f"model.revision: {why}, and revisions are of models on the Hub; leave the field out")


def near_tags(store: Store, model: ModelConfig) -> str:
    """A hint at tags of the store with a similar spelling; empty if there are none."""
    near = difflib.get_close_matches(model.name or "", sorted(store.tags.all()), n=2)
    return f" (did you mean the tag {' or '.join(near)}?)" if near else ""


def pin_model(model: ModelConfig, hint: str = "") -> BaseModelConfig:
    """Pin the origin of a model: digests of a local folder's files, a commit on the Hub, or versions at an address.

    Raises UserError, with the ``hint`` if there is no such model.
    """
    from alignment_core.data.hub import commit_of

    if model.scratch is not None:
        return BaseModelConfig(model=model)
    if is_address(str(model.name)):
        return BaseModelConfig(model=model, remote=_at_address(model))
    folder = Path(str(model.name)).expanduser()
    written_as_path = is_written_as_path(str(model.name))
    if written_as_path and folder.is_dir():
        _check_no_revision(model, f"{folder} is a folder")
        if not (folder / "config.json").is_file():
            raise UserError(f"model: {folder} is a folder without config.json; give a Hugging Face model folder")
        files = _files(folder, model)
        check_weights(folder)
        return BaseModelConfig(model=model, files={name: _digest(path) for name, path in files.items()})
    if written_as_path:
        raise UserError(f"model: {folder}: no such folder ({BEGINS})")
    return BaseModelConfig(model=model, commit=commit_of(str(model.name), model.revision, "model", hint))


def _digest(path: Path) -> str:
    """SHA-256 of a model's file, which this process reads once: for the plan of a run and for the run. The stage compares the
    bytes that it copies with it."""
    status = path.stat()
    return _digest_of_state(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.lru_cache(maxsize=256)
def _digest_of_state(path: Path, *_state: int) -> str:
    return digest_of_file(path)


def _at_address(model: ModelConfig) -> dict[str, RemoteFile]:
    address = str(model.name)
    _check_no_revision(model, f"{address} is an address")
    try:
        files = pinned_folder(address, ("*.safetensors", *_patterns(model)))
    except AlignmentError as error:
        raise type(error)(f"model: {error}") from error
    if "config.json" not in files:
        raise UserError(f"model: {address} has no config.json; give the address of a Hugging Face model folder")
    files = {name: file for name, file in files.items() if not name.startswith("consolidated")}
    if not any(name.endswith(".safetensors") for name in files):
        raise UserError(f"model: {address} {NO_SAFETENSORS}")
    return files


SHOWS = {"parameters": "parameters"}
STAGE = Stage("base_model", 1, {"model": "model"}, BaseModelConfig, run, SHOWS)
