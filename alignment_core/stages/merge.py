"""Stage: several models → one, with an average of their weights."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alignment_core.artifacts.reference import POINTER
from alignment_core.errors import UserError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.models.quantization import why_not_changed
from alignment_core.models.saved_stop_tokens import stop_at_turn_end
from alignment_core.models.saving import CHAT_TEMPLATES, check_loadable, copy_files, read_json, weight_files

if TYPE_CHECKING:
    from torch import Tensor

BASE = "base"
"""Role of the model from which the others were trained."""


class MergeStageConfig(StageConfig):
    """How the inputs ``model-1``, ``model-2``, … become one."""

    merge_method: Literal["linear", "slerp", "ties"]
    weights: tuple[float, ...]
    density: float | None = None
    scale: float | None = None

    @property
    def roles(self) -> list[str]:
        """Roles of the models that are merged."""
        return [f"model-{number}" for number in range(1, len(self.weights) + 1)]


class Tensors:
    """The tensors of a checkpoint, read lazily."""

    def __init__(self, role: str, folder: Path, opened: ExitStack) -> None:
        from safetensors import safe_open

        if problem := why_not_changed(f"merge.models: {role}", read_json(folder / "config.json")):
            raise UserError(problem)
        self.role = role
        paths = weight_files(check_loadable(folder))
        self.files = {path.name: opened.enter_context(safe_open(path, "pt")) for path in paths}
        self.file_of = {name: file for file in self.files.values() for name in file.keys()}  # noqa: SIM118 (no mapping)
        self.copy_of: dict[str, str] = {}
        """Second names of tensors, which are not in ``file_of``: those of tied heads that are stored beside the embeddings."""

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of[name].get_tensor(name)
        return tensor

    def shapes(self) -> dict[str, list[int]]:
        return {name: file.get_slice(name).get_shape() for name, file in self.file_of.items()}


def run(context: StageContext, config: MergeStageConfig) -> dict[str, Any]:
    from safetensors.torch import save_file

    first = context.inputs[config.roles[0]]
    _check_tokenizers({role: context.inputs[role] for role in config.roles})
    copy_files(first, context.output, (CHAT_TEMPLATES,))
    for path in first.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != POINTER:  # a merge has no master weights
            shutil.copyfile(path, context.output / path.name)
    with ExitStack() as opened:
        models = [Tensors(role, context.inputs[role], opened) for role in config.roles]
        base = Tensors(BASE, context.inputs[BASE], opened) if BASE in context.inputs else None
        if base is None and config.merge_method != "linear":
            raise UserError(
                f"merge: {config.merge_method} merges the changes of models to the input `{BASE}`, which is missing"
            )
        all_models = [*models, *([base] if base else [])]
        _find_tied_heads(all_models)
        _check_shapes(all_models)
        if not any(name.startswith("score.") for name in models[0].file_of):  # a base model names its EOS alone
            stop_at_turn_end(context.output, trust_remote_code=context.trust_remote_code)
        merge = _merger(config, models, base)
        done = 0
        for file, tensors in models[0].files.items():
            merged = {}
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                context.report(done, len(models[0].file_of), "tensors")
                source = models[0].copy_of.get(name, name)
                own = models[0][source]  # a tensor of integers, such as a counter, is not merged
                merged[name] = merge(source).to(own.dtype) if own.is_floating_point() else own
                done += 1
            save_file(merged, context.output / file, metadata={"format": "pt"})
        parameters = sum(math.prod(shape) for shape in models[0].shapes().values())
    return {"parameters": parameters, "models": len(models)}


def _merger(config: MergeStageConfig, models: list[Tensors], base: Tensors | None) -> Callable[[str], Tensor]:
    """The function that merges the tensors of a name."""
    from alignment_core.models.merging import least_kept, linear, slerp, ties

    if base is None:
        return lambda name: linear([model[name] for model in models], config.weights)
    if config.merge_method == "slerp":
        first, second = models
        share = config.weights[1] / sum(config.weights)
        return lambda name: slerp(base[name], first[name], second[name], share)
    density, scale = config.density, config.scale
    assert density, "the recipe is validated"
    assert scale, "the recipe is validated"
    least = [least_kept(partial(_changes, model, base), density) for model in models]
    return lambda name: ties(base[name], [model[name] for model in models], config.weights, least, scale)


def _changes(model: Tensors, base: Tensors) -> Iterator[Tensor]:
    for name in base.file_of:
        if (tensor := base[name]).is_floating_point():
            yield model[name].float() - tensor.float()


def _check_tokenizers(folders: dict[str, Path]) -> None:
    """Raise UserError unless all models have the tokenizer of the first."""
    from alignment_core.models.same_tokenizer import difference

    (role, first), *others = folders.items()
    for other, folder in others:
        if clause := difference(first, folder):
            raise UserError(
                f"merge.models: the tokenizer of {other} differs from that of {role} ({clause}); merge models "
                "with the same tokenizer"
            )


def _find_tied_heads(models: list[Tensors]) -> None:
    """Take the only tensor of a model that others lack for a second name of the tensor that it equals.

    That is a tied head: ``transformers`` leaves it out when it saves a model, and some models on the Hub, such as Qwen3-0.6B,
    store it, too.
    """
    common = set.intersection(*({*model.file_of} for model in models))
    for model in models:
        if len(names := model.file_of.keys() - common) != 1:
            continue
        (name,) = names
        shapes, head = model.shapes(), model[name]
        for other in sorted(common):
            if shapes[other] != shapes[name]:
                continue
            tensor = model[other]
            if tensor.dtype == head.dtype and tensor.equal(head):
                model.copy_of[name] = other
                del model.file_of[name]
                break


def _check_shapes(models: list[Tensors]) -> None:
    """Raise UserError for the first tensor whose shape differs from that of the first model."""
    first = models[0].role
    shapes = models[0].shapes()
    for model in models[1:]:
        other_shapes = model.shapes()
        for name in sorted(shapes.keys() | other_shapes.keys()):
            if shapes.get(name) != other_shapes.get(name):
                has, not_has = (f"{known[name]}" if name in known else "not at all" for known in (other_shapes, shapes))
                raise UserError(
                    f"merge.models: {model.role} has the tensor {name} {has}, {first} {not_has}; merge models of one "
                    "architecture"
                )


SHOWS = {"models": "models", "parameters": "parameters"}
STAGE = Stage(
    "merge", 1, {"model": "model"}, MergeStageConfig, run, SHOWS, packages=("jinja2", "torch", "transformers")
)
