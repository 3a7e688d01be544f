"""The first layers of a model, up to one of each kind: enough to see how it attends, and fast for a model of any depth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_OF_ONE_LAYER = {"layer_idx", "training"}
"""Attributes that differ between layers of one kind."""


@contextmanager
def first_layers(model: Any) -> Iterator[int]:
    """In this context the model has only its first layers, up to the first one of its last kind; gives their number.

    Layers are of one kind if their modules, their plain attributes, the shapes of their parameters and the entries of lists in
    the model's configuration are the same. A model whose layers are not one list is left as it is.
    """
    count: int = model.config.get_text_config().num_hidden_layers
    owners = [
        (module, name)
        for module in model.modules()
        for name, child in module._modules.items()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(owners) != 1:
        yield count
        return
    owner, name = owners[0]
    layers = owner._modules[name]
    assert isinstance(layers, nn.ModuleList)
    kinds = [_kind(model, number, layer) for number, layer in enumerate(layers)]
    first = max(kinds.index(kind) for kind in kinds) + 1
    owner._modules[name] = layers[:first]
    try:
        yield first
    finally:
        owner._modules[name] = layers


def _kind(model: Any, number: int, layer: nn.Module) -> tuple[Any, ...]:
    """What makes a layer differ from others."""
    config = model.config.get_text_config()
    listed = [
        (name, value[number])
        for name, value in sorted(vars(config).items())
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers
    ]
    modules = [
        (
            name,
            type(module),
            sorted(
                (attribute, value)
                for attribute, value in vars(module).items()
                if attribute not in _OF_ONE_LAYER and isinstance(value, bool | int | float | str)
            ),
            [(parameter, tuple(weight.shape)) for parameter, weight in module.named_parameters(recurse=False)],
        )
        for name, module in layer.named_modules()
    ]
    return (str(listed), str(modules))
