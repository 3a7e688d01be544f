"""The coefficients of hardware that ran stages before: what the model of the cost takes for them, by what they took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.artifacts.provenance import Provenance
from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.hardware import Coefficients, Hardware
from alignment_core.capacity.seconds import Timing
from alignment_core.errors import UserError

CPU = Hardware("cpu", 0, 1e11, 1e10, 1e10, 1e9, per_node=1 << 20)
"""Round numbers for a machine without a datasheet; only their products with coefficients count."""
FULL = Coefficients(1.0, 1.0, 1.0, 0.0, 1e9, 1e9, 1e9)
"""All of the hardware's rates."""
NAMES = ("training", "forward", "decoding")
"""Coefficients that stages measure."""


def coefficients_of(
    records: Iterable[Provenance], hardware: Hardware, shape_of: Callable[[Reference], dict[str, Any]]
) -> Coefficients:
    """The medians of the stages with these records; ``shape_of`` reads the ``config.json`` of a model in the store. What was
    not measured has the value of what was.

    Raises UserError if none trained or sampled.
    """
    measured: dict[str, list[float]] = {}
    for record in records:
        for name, value in measured_by(record, hardware, shape_of):
            measured.setdefault(name, []).append(value)
    if not measured:
        raise UserError("--like: no stage of that run trained or sampled; name a run that did, and that was not cached")
    known = {name: median(values) for name, values in measured.items()}
    usual = known.get("training", next(iter(known.values())))
    return replace(Coefficients(), **{name: known.get(name, usual) for name in NAMES}, seconds_per_layer=0.0)


def measured_by(
    record: Provenance, hardware: Hardware, shape_of: Callable[[Reference], dict[str, Any]]
) -> Iterator[tuple[str, float]]:
    """Names and values of the coefficients that a stage measured: its seconds at full rates by those that it took."""
    model = record.inputs.get("model") or record.inputs.get("policy")
    cost = record.cost
    if model is None or not any(cost.get(name) for name in ("train_seconds", "score_seconds", "generate_seconds")):
        return
    timing = Timing(Architecture.of(shape_of(model)), hardware, FULL)
    on_cpu = hardware.name == CPU.name  # whose ranks and engines share the cores
    ranks, engines = (1 if on_cpu else int(record.hardware.get(name, 1)) for name in ("trainers", "engines"))
    no_limit = 1 << 40
    if cost.get("train_seconds") and cost.get("train_tokens"):
        full = timing.training(cost["train_tokens"], 0, ranks, 0, recompute=False, budget=no_limit)
        yield "training", full / cost["train_seconds"]
    if cost.get("score_seconds") and cost.get("score_tokens"):
        yield "forward", timing.forward(cost["score_tokens"], 0, ranks, budget=no_limit) / cost["score_seconds"]
    if cost.get("generate_seconds") and cost.get("completion_tokens"):
        prompts, completions = record.metrics["prompts"], record.metrics["completions"]
        generation = record.config["generation"]
        full = timing.sampling(
            prompts,
            cost["prompt_tokens"] / prompts,
            completions,
            cost["completion_tokens"] / completions,
            engines,
            shards=1,
            at_once=generation["shard_size"] * generation["num_generations"],
        )
        yield "decoding", full / cost["generate_seconds"]
