"""Warnings about stages that quantize weights which were trained beside weights in as many bits before.

Such a stage saves its dequantized weights plus the changes of its adapters. Rounded to the same values again, a weight whose
change is less than half a step is what it was before training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignment_core.artifacts import Reference, Store
from alignment_core.composition.plan import PlannedStage
from alignment_core.lineage import Graph
from alignment_core.models.quantization import Bits, field_of
from alignment_core.models.saving import ADAPTER

START = ("model", "policy", "critic")
"""Roles of the models that a stage trains further."""
WEIGHTS = re.compile(rf"model(-\d+)?|policy|base|{ADAPTER}")
"""Roles of the inputs whose weights are in the model that a stage makes."""
OTHER: Mapping[Bits, Bits] = {4: 8, 8: 4}


def warnings(store: Store, todo: Sequence[PlannedStage]) -> Iterator[str]:
    """A sentence for each number of bits to which these stages round weights a second time."""
    quantized = [(stage, bits) for stage in todo if (bits := _bits(stage.config.model_dump(mode="json")))]
    if not quantized:
        return
    again: dict[Bits, list[tuple[str, str]]] = {}
    with Graph.of(store) as graph:
        for stage, bits in quantized:
            for role in START:
                before = _trained_beside(bits, stage.inputs[role], graph) if role in stage.inputs else None
                if before is not None:
                    again.setdefault(bits, []).append((stage.label, before))
    for bits, pairs in again.items():
        stages, earlier = (", ".join(dict.fromkeys(labels)) for labels in zip(*pairs, strict=True))
        yield (
            f"{stages}: {field_of(bits)} rounds weights to {bits} bits that were trained beside {bits} bits before, by "
            f"{earlier}: most of what adapters learned there is less than half a step of the rounding and is lost; leave the "
            f"field out in all but one of these stages, or set load_in_{OTHER[bits]}bit in one of them"
        )


def _bits(config: Mapping[str, Any]) -> Bits | None:
    """Bits of the weights beside which a stage of this configuration trains adapters; None: they are not quantized."""
    section: Any = config.get("section", config)
    for name in ("training", "lora"):
        section = section.get(name) if isinstance(section, Mapping) else None
    lora = section if isinstance(section, Mapping) else {}
    return next((bits for bits in OTHER if lora.get(f"load_in_{bits}bit")), None)


def _trained_beside(bits: Bits, model: PlannedStage | Reference, graph: Graph) -> str | None:
    """The last stage behind a model that trained it beside weights in so many bits, by its label; None if there is none."""
    waiting = [model]
    seen = set[Reference]()
    while waiting:
        model = waiting.pop()
        made: list[tuple[str, Mapping[str, Any], Mapping[str, PlannedStage | Reference]]] = []
        if isinstance(model, PlannedStage):
            made = [(model.label, model.config.model_dump(mode="json"), model.inputs)]
        elif model not in seen:
            seen.add(model)
            name = model.short
            made = [(f"{record.label} ({name})", record.config, record.inputs) for record in graph.made_by(model)]
        for label, config, inputs in made:
            if _bits(config) == bits:
                return label
            waiting += [value for role, value in inputs.items() if WEIGHTS.fullmatch(role)]
    return None
