"""Stage: one model whose weights are an average of those of several."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alignment_core.errors import UserError
from alignment_core.execution.base import Stage, StageConfig, StageContext, below
from alignment_core.models.saving import check_loadable, weight_files

if TYPE_CHECKING:
    from torch import Tensor

BASE = "base"
"""Role of the model that the others were made from."""


class MergeStageConfig(StageConfig):
    """How the inputs ``model-1``, ``model-2``, … become one."""

    merge_method: Literal["linear", "slerp", "ties"]
    weights: tuple[float, ...]
    density: float | None = None
    scale: float | None = None

    @property
    def roles(self) -> list[str]:
        """Of the models that are merged."""
        return [f"model-{number}" for number in range(1, len(self.weights) + 1)]


class Tensors:
    """Those of a checkpoint, read when they are asked for."""

    def __init__(self, role: str, folder: Path, opened: ExitStack) -> None:
        from safetensors import safe_open

        self.role, found = role, weight_files(check_loadable(folder))
        self.files = {path.name: opened.enter_context(safe_open(path, "pt")) for path in found}
        self.file_of = {name: file for file in self.files.values() for name in file.keys()}  # noqa: SIM118 (no mapping)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of[name].get_tensor(name)
        return tensor

    def shapes(self) -> dict[str, list[int]]:
        return {name: file.get_slice(name).get_shape() for name, file in self.file_of.items()}


def run(context: StageContext, config: MergeStageConfig) -> dict[str, Any]:
    from safetensors.torch import save_file

    first = context.inputs[config.roles[0]]
    _check_tokenizers({role: context.inputs[role] for role in config.roles})
    for path in first.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, context.output / path.name)
    with ExitStack() as opened:
        models = [Tensors(role, context.inputs[role], opened) for role in config.roles]
        base = Tensors(BASE, context.inputs[BASE], opened) if BASE in context.inputs else None
        _check_shapes([*models, *([base] if base else [])])
        done, parameters = 0, 0
        for file, tensors in models[0].files.items():
            merged = {}
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                context.report(done, len(models[0].file_of), "tensors")
                merged[name] = _merged(config, [model[name] for model in models], base[name] if base else None)
                done, parameters = done + 1, parameters + merged[name].numel()
            save_file(merged, context.output / file, metadata={"format": "pt"})
    return {"parameters": parameters, "models": len(models)}


def _merged(config: MergeStageConfig, tensors: list[Tensor], base: Tensor | None) -> Tensor:
    """In the type of the first model. What is no float, such as a counter, is that of the first."""
    from alignment_core.models.merging import linear, slerp, ties

    if not tensors[0].is_floating_point():
        return tensors[0]
    if base is not None:
        assert config.density, "the recipe is validated"
        assert config.scale, "the recipe is validated"
        merged = ties(base, tensors, config.weights, config.density, config.scale)
    elif config.merge_method == "slerp":
        first, second = tensors
        merged = slerp(first, second, config.weights[1] / sum(config.weights))
    else:
        merged = linear(tensors, config.weights)
    return merged.to(tensors[0].dtype)


def _check_tokenizers(folders: dict[str, Path]) -> None:
    """Raise UserError if a token would mean something else to one of the models than to the first."""
    (role, first), *others = folders.items()
    for other, folder in others:
        for name in ("tokenizer.json", "tokenizer.model"):
            ours, theirs = ((one / name).read_bytes() if (one / name).is_file() else b"" for one in (first, folder))
            if ours != theirs:
                raise UserError(f"merge.models: {other} has another {name} than {role}; merge models of one tokenizer")


def _check_shapes(models: list[Tensors]) -> None:
    """Raise UserError for the first tensor that one model has otherwise than the first."""
    first, shapes = models[0].role, models[0].shapes()
    for model in models[1:]:
        theirs = model.shapes()
        for name in sorted(shapes.keys() | theirs.keys()):
            if shapes.get(name) != theirs.get(name):
                has, not_has = (f"{one[name]}" if name in one else "not at all" for one in (theirs, shapes))
                raise UserError(
                    f"merge.models: {model.role} has the tensor {name} {has}, {first} {not_has}; merge models of one "
                    "architecture"
                )


SHOWS = {"models": "models", "parameters": "parameters"}
CODE = below("alignment_core.models", "merging saving")
STAGE = Stage("merge", 1, {"model": "model"}, MergeStageConfig, run, SHOWS, code=CODE, packages=("torch",))
