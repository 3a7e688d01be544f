"""Limits from the shape of a model: head sizes that the installed vLLM's attention does not support, too long completions, and
reward models without a score head."""

from __future__ import annotations

import ast
import atexit
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.composition.plan import PlannedStage
from alignment_core.data.addresses import RemoteFile, download
from alignment_core.models.saving import is_multimodal, weight_files
from alignment_core.recipes import ResourcesConfig
from alignment_core.source_code import parse
from alignment_core.stages.base_model import BaseModelConfig

CPU_ATTENTION = Path("v1", "attention", "backends", "cpu_attn.py")
AUTO_MODELS = Path("models", "auto", "modeling_auto.py")


def shape_of(store: Store, model: PlannedStage | Reference) -> dict[str, Any]:
    """The ``config.json`` of a model that no stage trains; empty if it cannot be read now."""
    model = below_adapters(model)
    if isinstance(model, Reference):
        file = store.fetch(model) / "config.json"
        return json.loads(file.read_text()) if file.is_file() else {}
    config: Any = model.config
    return model_shape(config)


def below_adapters(model: PlannedStage | Reference) -> PlannedStage | Reference:
    """The model below merged adapters, which do not change its shape."""
    while isinstance(model, PlannedStage) and model.stage == "merge_adapter":
        model = model.inputs["model"]
    return model


def model_shape(config: BaseModelConfig) -> dict[str, Any]:
    """The model's own ``config.json``, before the model is in a store; empty if it cannot be read now."""
    model = config.model
    if model.scratch is not None:
        return model.scratch.model_dump()
    try:
        if config.commit is None:
            folder = without_weights(config.remote) if config.remote else Path(str(model.name)).expanduser()
            return dict(json.loads((folder / "config.json").read_text()))
        from huggingface_hub import hf_hub_download

        return dict(
            json.loads(Path(hf_hub_download(str(model.name), "config.json", revision=config.commit)).read_text())
        )
    except Exception:  # no network, no such file: the stage that needs it will report this
        return {}


def without_weights(files: Mapping[str, RemoteFile]) -> Path:
    """A folder with the files of a model or adapter at an address, but for its weights. It lasts as long as this process."""
    return _downloaded(tuple((name, file) for name, file in files.items() if not name.endswith(".safetensors")))


@functools.cache
def _downloaded(files: tuple[tuple[str, RemoteFile], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="align-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    download(dict(files), folder)
    return folder


WEIGHTS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Fields of a ``config.json`` that determine the weights of a model."""


def difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """The first field that shows that two models have weights of different shapes, if there is one."""
    first, second = ({"model_type": shape.get("architecture"), **shape} for shape in (first, second))
    known = (name for name in WEIGHTS if first.get(name) is not None and second.get(name) is not None)
    return next((name for name in known if first[name] != second[name]), None)


def without_score_head(config: BaseModelConfig) -> bool:
    """Whether a model is certainly a language model and not a reward model; models of the Hub are not checked."""
    if config.model.scratch is not None:
        return True
    if config.commit is not None or config.remote:
        return False
    files = weight_files(Path(str(config.model.name)).expanduser())
    architectures = model_shape(config).get("architectures") or [""]
    if not files or not all(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures):
        return False
    from safetensors import SafetensorError, safe_open

    try:
        for file in files:
            with safe_open(file, "numpy") as weights:
                if any("score" in name for name in weights.keys()):  # noqa: SIM118 (it has no __iter__)
                    return False
    except (OSError, SafetensorError):  # the stage that needs it will report this
        return False
    return True


def why_no_rewards(shape: dict[str, Any], trust_remote_code: bool) -> str | None:
    """Why a model with this ``config.json`` cannot be a reward model, one score by a head ``score``; None if it may be one."""
    code = shape.get("auto_map") or {}
    if trust_remote_code and "AutoConfig" in code:
        if "AutoModelForSequenceClassification" in code:
            return None
        return "brings code without a class for AutoModelForSequenceClassification (auto_map of its config.json)"
    classes = [name for name in shape.get("architectures") or [] if name.endswith("ForSequenceClassification")]
    labels = len(shape.get("id2label") or ()) or shape.get("num_labels") or 1
    if classes and labels > 1:
        return f"is a classifier with {labels} labels, and a reward model has one score"
    if classes and lacks_score(classes[0], str(shape.get("model_type"))):
        return f"is a {classes[0]}, which has no head `score`, as encoders have none"
    return None


@functools.cache
def lacks_score(classifier: str, model_type: str) -> bool:
    """Whether a class of ``transformers`` certainly has no head of the name ``score``, from its source."""
    for node in _source(model_type):
        if isinstance(node, ast.ClassDef) and node.name == classifier:
            source = ast.unparse(node)
            return not any(part in source for part in ("GenericForSequenceClassification", "self.score ="))
    return False


def is_loaded_without_images(shape: dict[str, Any]) -> bool:
    """Whether a multimodal model's part for text alone is loaded as a language model, as with Mllama: see
    :func:`alignment_core.models.image_text.image_text_class`."""
    if not is_multimodal(shape):
        return False
    whole = [name for name in shape.get("architectures") or [] if name.endswith("ForConditionalGeneration")]
    language_model = language_models().get(shape.get("model_type", ""))
    if not whole or language_model in (None, *whole):
        return False
    return not shape.get("vision_config") or not _defines(whole[0], str(shape["model_type"]), "get_image_features")


@functools.cache
def _defines(name: str, model_type: str, method: str) -> bool:
    """Whether a class of ``transformers`` certainly has this method, from its source."""
    return any(
        isinstance(part, ast.FunctionDef) and part.name == method
        for node in _source(model_type)
        if isinstance(node, ast.ClassDef) and node.name == name
        for part in node.body
    )


def _source(model_type: str) -> Iterator[ast.stmt]:
    """The classes and functions of a kind of model in ``transformers``."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        module = model_type.replace("-", "_")
        file = Path(folder) / "models" / module / f"modeling_{module}.py"
        if file.is_file():
            yield from parse(file.read_text()).body


@functools.cache
def language_models() -> dict[str, str]:
    """The class of ``AutoModelForCausalLM`` by ``model_type``, from the source of ``transformers``, which imports torch."""
    spec = importlib.util.find_spec("transformers")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for node in parse((Path(folder) / AUTO_MODELS).read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
                assert isinstance(node.value, ast.Call)
                return dict(ast.literal_eval(node.value.args[0]))
    return {}


def wrong_heads(shape: dict[str, Any], resources: ResourcesConfig) -> Iterator[str]:
    """A sentence if the engines cannot serve the model's head size on this machine's processors."""
    served = head_sizes_on_cpu()
    heads, width = shape.get("num_attention_heads"), shape.get("hidden_size")
    size = shape.get("head_dim") or (width // heads if heads and width else None)
    if size is not None and served and size not in served and on_cpu(resources):
        yield (
            f"model: its heads have {size} dimensions (hidden_size {width} / num_attention_heads {heads}), which "
            f"vLLM's attention on the CPU does not support; it supports {', '.join(map(str, served))}"
        )


def why_not_together(shape: dict[str, Any], ranks: int) -> str | None:
    """Why so many ranks certainly cannot compute a sequence of a model of this shape together; None if they may."""
    shape = shape.get("text_config") or shape
    heads = shape.get("num_attention_heads")
    if heads and heads % ranks:
        return f"its {heads} attention heads cannot be shared by {ranks} ranks"
    listed = shape.get("layer_types") or []
    if kinds := {*listed} - {"full_attention", "attention"}:
        return f"it has layers of other kinds than full attention ({', '.join(sorted(kinds))})"
    if shape.get("sliding_window") and shape.get("use_sliding_window", True) and not listed:
        return "its attention has a sliding window"
    return None


def on_cpu(resources: ResourcesConfig) -> bool:
    """Whether the engines certainly have no GPU; a cluster may have one elsewhere."""
    alone = not os.environ.get("RAY_ADDRESS") and shutil.which("nvidia-smi") is None
    return resources.device == "cpu" or (resources.device == "auto" and alone)


@functools.cache
def head_sizes_on_cpu() -> tuple[int, ...]:
    """Head sizes that the installed vLLM's attention supports on the CPU, from its source; none if it does not list them."""
    spec = importlib.util.find_spec("vllm")  # does not import it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / CPU_ATTENTION
        if file.is_file():
            return tuple(_returned(parse(file.read_text()), "get_supported_head_sizes"))
    return ()


def _returned(tree: ast.AST, function: str) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function and isinstance(node.body[-1], ast.Return):
            value = node.body[-1].value
            yield from ast.literal_eval(value) if isinstance(value, ast.List) else ()
            return


def too_long(stage: PlannedStage, room: int, longest_prompt: int, most: int | None) -> Iterator[str]:
    """A sentence if a stage's longest prompt and completion exceed ``most``, the model's maximum in tokens.

    ``longest_prompt`` is a lower bound of its longest prompt, ``room`` the maximum of a completion, both in tokens.
    """
    if most is not None and longest_prompt + room > most:
        yield (
            f"{stage.label}: the longest prompt has {longest_prompt} tokens or more; with max_completion_length {room} "
            f"that makes {longest_prompt + room}, but the model takes at most {most} (max_position_embeddings). Lower "
            "generation.max_completion_length or prompts.max_prompt_length"
        )
