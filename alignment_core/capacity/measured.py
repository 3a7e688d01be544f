"""The coefficients of hardware that ran stages before: what the model of the cost takes for them, by what they took.

On a processor the time of trainers and engines is that of their cores, not of the clock: what else the machine did meanwhile,
such as the start of engines for a later stage, would count as slow hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
FULL = Coefficients(1.0, 1.0, 1.0, 1.0, 0.0, 1e9, 1e9, 1e9)
"""All of the hardware's rates."""
THREADS = {
    "train": ("trainers", "threads"),
    "score": ("trainers", "threads"),
    "generate": ("engines", "engine_threads"),
}
"""Parts of a stage's cost, and the fields of its hardware with the number of their processes and threads."""
NAMES = ("training", "forward", "decoding")
"""Coefficients that stages measure. Sampling measures that of reading prompts and that of decoding as one."""


def coefficients_of(
    records: Iterable[Provenance], hardware: Hardware, shape_of: Callable[[Reference], dict[str, Any]]
) -> Coefficients:
    """The medians of the stages with these records; ``shape_of`` reads the ``config.json`` of a model in the store. What was
    not measured has the value of what was.

    Raises UserError if none trained on fixed rows, scored or sampled.
    """
    measured: dict[str, list[float]] = {}
    for record in records:
        for name, value in measured_by(record, hardware, shape_of):
            measured.setdefault(name, []).append(value)
    if not measured:
        raise UserError(
            "--like: no stage of that run trained on fixed rows, scored or sampled (stages of reinforcement learning do not "
            "count); name a run with one that was not cached"
        )
    known = {name: median(values) for name, values in measured.items()}
    usual = known.get("training", next(iter(known.values())))
    values = {name: known.get(name, usual) for name in NAMES}
    return replace(Coefficients(), **values, prefill=values["decoding"], seconds_per_layer=0.0)


def measured_by(
    record: Provenance, hardware: Hardware, shape_of: Callable[[Reference], dict[str, Any]], by_clock: bool = False
) -> Iterator[tuple[str, float]]:
    """Names and values of the coefficients that a stage measured: its seconds at full rates by those that it took;
    ``by_clock``, on a processor, too."""
    model = record.inputs.get("model") or record.inputs.get("policy")
    cost = record.cost
    if model is None or not any(cost.get(name) for name in ("train_seconds", "score_seconds", "generate_seconds")):
        return
    timing = Timing(Architecture.of(shape_of(model)), hardware, FULL)
    on_cpu = hardware.name == CPU.name  # whose ranks and engines share the cores
    ranks, engines = (1 if on_cpu else int(record.hardware.get(name, 1)) for name in ("trainers", "engines"))
    seconds = {part: _seconds(part, record, on_cpu and not by_clock) for part in THREADS}
    no_limit = 1 << 40
    if seconds["train"] and cost.get("train_tokens"):
        full = timing.training(_tokens("train", cost), 0, ranks, 0, recompute=False, budget=no_limit)
        yield "training", full / seconds["train"]
    if seconds["score"] and cost.get("score_tokens"):
        yield "forward", timing.forward(_tokens("score", cost), 0, ranks, budget=no_limit) / seconds["score"]
    if seconds["generate"] and cost.get("prompt_tokens"):  # steps of reinforcement learning do not count theirs
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
        yield "decoding", full / seconds["generate"]


def _tokens(part: str, cost: Mapping[str, float]) -> float:
    """Tokens that a part of a stage computed; records of earlier versions have all tokens of its rows alone."""
    return cost.get(f"{part}_computed_tokens") or cost[f"{part}_tokens"]


def _seconds(part: str, record: Provenance, of_cores: bool) -> float:
    """Seconds that a part of a stage took, 0 if it had none; ``of_cores``: those of its cores, if the record has them. Records
    of earlier versions lack the processor time of the workers of tensor-parallel engines."""
    wall = record.cost.get(f"{part}_seconds", 0.0)
    busy = record.cost.get(f"{part}_processor_seconds", 0.0)
    in_workers = part == "generate" and int(record.hardware.get("tensor_parallel_size", 1)) > 1
    processes, threads = (int(record.hardware.get(name, 1)) for name in THREADS[part])
    return busy / (processes * threads) if of_cores and busy and not in_workers else wall
