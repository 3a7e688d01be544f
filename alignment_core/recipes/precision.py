"""The default of `training.bf16`: true in a recipe that names GPUs (`resources.device: cuda`).

It follows the recipe, not the machine, because the precision is part of the keys of stages, which must be the same on every
machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from alignment_core.recipes.base import Config, section_of
from alignment_core.recipes.sections.training import WHOLE_MATRICES, TrainingConfig

BF16 = "bf16"


def on_gpus(content: Mapping[str, Any]) -> bool:
    """Whether a recipe with this content names GPUs."""
    resources = _given(content.get("resources"))
    return resources is not None and resources.get("device") == "cuda"


def in_bf16(kind: type[BaseModel], content: Mapping[str, Any]) -> dict[str, Any]:
    """The ``content`` of a section of this ``kind``, with ``bf16: true`` in each training below it that leaves it out and whose
    optimiser supports it. Sections that train nothing stay as they are."""
    filled = dict(content)
    for name, field in kind.model_fields.items():
        inner = section_of(field.annotation)
        below = _given(content.get(name, field.get_default()))
        if inner is None or below is None or not issubclass(inner, Config):
            continue
        if not issubclass(inner, TrainingConfig):
            changed = in_bf16(inner, below)
        elif BF16 in below or below.get("optimizer") in WHOLE_MATRICES or _has_no_rows(kind, content):
            continue
        else:
            changed = {**below, BF16: True}
        if changed != below:
            filled[name] = changed if name in content else _new(changed, below)
    return filled


def unset(section: BaseModel, given: Mapping[str, Any], filled: Mapping[str, Any]) -> None:
    """Let what :func:`in_bf16` has ``filled`` into the ``given`` content of a section not count as set."""
    for name, value in filled.items():
        before, inner = given.get(name), getattr(section, name, None)
        if value is before or not isinstance(inner, BaseModel):
            continue
        if name not in given:
            section.model_fields_set.discard(name)
        unset(inner, _given(before) or {}, value)
    if BF16 in filled and BF16 not in given:
        section.model_fields_set.discard(BF16)


def _given(section: Any) -> dict[str, Any] | None:
    """The fields that are set in a section, which was written or made in Python; None for anything else."""
    if isinstance(section, BaseModel):
        return {name: getattr(section, name) for name in section.model_fields_set}
    return dict(section) if isinstance(section, Mapping) else None


def _new(changed: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What was added to the default of a section that the recipe leaves out; it gets that default by its place, as usual."""
    return {name: value for name, value in changed.items() if name not in default or value != default[name]}


def _has_no_rows(kind: type[BaseModel], content: Mapping[str, Any]) -> bool:
    """Whether a section may train on rows of its own, and has none: an existing reward model, distillation in rounds alone."""
    return "data" in kind.model_fields and content.get("data") is None
