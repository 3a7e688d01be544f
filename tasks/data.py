"""Tasks that bring models and data into the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment.tasks.graph import CURRENT, Input, Step, submit, training_data
from alignment_core.artifacts import Reference
from alignment_core.data import kinds
from alignment_core.data.pin import pin
from alignment_core.models.saving import ADAPTER
from alignment_core.recipes import DataConfig, ModelConfig
from alignment_core.stages.base_model import in_store, near_tags, pin_model
from alignment_core.stages.dataset import DatasetConfig
from alignment_core.stages.merge_adapter import MergeAdapterConfig, pin_adapter
from alignment_core.stages.overlap import HELD_OUT, OverlapConfig


def base_model(label: str, model: ModelConfig, kinds: Sequence[str] = ("model",)) -> Step | Reference:
    """The model that the recipe names: an artifact or tag of the store as it is, anything else through a stage."""
    store = CURRENT.get().store
    if model.adapter is not None:
        beside = base_model(f"{label}/base", model.model_copy(update={"adapter": None}), kinds)
        named = ModelConfig(name=model.adapter)
        adapter = in_store(store, named, (ADAPTER,), "model.adapter")
        config = (
            MergeAdapterConfig(adapter=model.adapter)
            if adapter
            else pin_adapter(model.adapter, near_tags(store, named))
        )
        config = config.model_copy(update={"chat_template": model.chat_template})
        merged: Step = submit("merge_adapter", label, config, {"model": beside, ADAPTER: adapter})
        return merged
    known = in_store(store, model, kinds)
    return known or submit("base_model", label, pin_model(model, near_tags(store, model)), {})


def dataset(
    label: str,
    data: DataConfig,
    kind: str,
    tokenizer: Input,
    rows: Input | None = None,
    stream: str = "",
    held_out: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Step:
    """Rows of a recipe's ``data``, or of the artifact ``rows``, as token ids of ``tokenizer`` (a model).

    ``kind`` names a kind of rows (:mod:`alignment_core.data.kinds`); data sets of one kind draw and shuffle their rows alike,
    unless they name another ``stream``; ``settings`` are what this kind alone is told. Nothing trains on
    them where they are ``held_out``; :func:`overlap` then says whether that is true of their prompts.
    """
    config = DatasetConfig(
        data=data,
        sources=() if rows else tuple(pin(source) for source in data.sources),
        kind=kind,
        settings=dict(settings or {}),
    )
    step: Step = submit("dataset", label, config, {"tokenizer": tokenizer, "rows": rows}, stream or kinds.stream(kind))
    if not held_out:
        training_data()[label] = step
    return step


def overlap(label: str, field: str, held_out: Input, max_overlap: float | None) -> Step:
    """Compare held-out prompts with all data that the run was told to train on so far.

    ``field`` is where the recipe names them; a share above ``max_overlap`` ends the run.
    """
    inputs = {HELD_OUT: held_out, **training_data()}
    return submit("overlap", label, OverlapConfig(field=field, max_overlap=max_overlap), inputs)
