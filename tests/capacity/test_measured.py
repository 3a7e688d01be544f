"""Coefficients of runs, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alignment_core.artifacts import Reference
from alignment_core.artifacts.provenance import Provenance
from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.cluster import Cluster
from alignment_core.capacity.hardware import Coefficients, hardware_of
from alignment_core.capacity.measured import CPU, coefficients_of, measured_by
from alignment_core.capacity.report import capacity
from alignment_core.capacity.seconds import Timing
from alignment_core.capacity.workload import Lengths, work_of
from alignment_core.errors import UserError
from tests.capacity.shapes import recipe_of

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
OPERATIONS = 6 * Architecture.of(SHAPE).parameters  # of a token in training


def record(cost: dict[str, float], **fields: Any) -> Provenance:
    model = Reference("model", "0" * 64)
    hardware = {"trainers": 2, "threads": 4, "engines": 1, "engine_threads": 8}
    return Provenance(
        key="1" * 64,
        stage="sft",
        label="sft",
        inputs={"model": model},
        outputs={"model": model},
        hardware=hardware,
        cost=cost,
        **fields,
    )


def shape_of(reference: Reference) -> dict[str, Any]:
    return SHAPE


def test_the_time_of_other_processes_on_the_cores_does_not_count() -> None:
    """8 threads were busy for 80 s in all, which an idle machine does in 10 s; the stage took 25 s."""
    cost = {"train_tokens": 1000.0, "train_seconds": 25.0, "train_processor_seconds": 80.0}
    [(name, value)] = measured_by(record(cost), CPU, shape_of)
    assert (name, value) == ("training", pytest.approx(OPERATIONS * 1000 / CPU.flops / 10))
    [(_, by_clock)] = measured_by(record(cost), CPU, shape_of, by_clock=True)
    assert by_clock == pytest.approx(OPERATIONS * 1000 / CPU.flops / 25)


def test_tensor_parallel_engines_are_measured_by_the_clock() -> None:
    """Their workers are other processes than the actor, whose processor time alone would make them 50 times as fast."""
    cost = {"prompt_tokens": 1e6, "completion_tokens": 1e6, "generate_seconds": 25.0}
    metrics = {"prompts": 100.0, "completions": 100.0}
    config = {"generation": {"shard_size": 10, "num_generations": 1}}
    by_clock = dict(measured_by(record(cost, metrics=metrics, config=config), CPU, shape_of))
    cost["generate_processor_seconds"] = 4.0
    parallel = record(cost, metrics=metrics, config=config)
    parallel.hardware["tensor_parallel_size"] = 2
    assert dict(measured_by(parallel, CPU, shape_of)) == by_clock


def test_a_measured_engine_takes_as_long_again() -> None:
    """Of 100 prompts of 50 tokens, each with a completion of 10, and whatever forward passes take."""
    cost = {"prompt_tokens": 5000.0, "completion_tokens": 1000.0, "generate_seconds": 25.0}
    config = {"generation": {"shard_size": 10, "num_generations": 1}}
    sampled = record(cost, metrics={"prompts": 100.0, "completions": 100.0}, config=config)
    scored = record({"score_tokens": 1000.0, "score_seconds": 7.0})
    timing = Timing(Architecture.of(SHAPE), CPU, coefficients_of([sampled, scored], CPU, shape_of))
    seconds = timing.sampling(prompts=100, prompt=50, completions=100, completion=10, engines=1, shards=1, at_once=10)
    assert seconds == pytest.approx(25.0)


def test_gpus_are_measured_by_the_clock() -> None:
    gpu = hardware_of("h100")
    cost = {"train_tokens": 1e9, "train_seconds": 25.0, "train_processor_seconds": 80.0}
    [(_, value)] = measured_by(record(cost), gpu, shape_of)
    assert value == pytest.approx(OPERATIONS * 1e9 / gpu.flops / 2 / 25)


def test_tokens_that_sequences_share_count_once() -> None:
    cost = {"train_tokens": 1000.0, "train_computed_tokens": 600.0, "train_seconds": 10.0}
    [(_, value)] = measured_by(record(cost), CPU, shape_of)
    assert value == pytest.approx(OPERATIONS * 600 / CPU.flops / 10)


def test_stages_of_reinforcement_learning_are_left_out() -> None:
    cost = {"train_seconds": 10.0, "generate_seconds": 10.0, "completion_tokens": 1000.0, "steps": 4.0}
    assert list(measured_by(record(cost), CPU, shape_of)) == []
    with pytest.raises(UserError, match="--like: no stage of that run trained on fixed rows"):
        coefficients_of([record(cost)], CPU, shape_of)


def test_a_recipe_on_a_processor_has_times_and_no_memory(tmp_path: Path) -> None:
    """At 50 and 25 % of 1e11 operations a second: 512 tokens, each of which attends to 4 others on average."""
    content = {"method": "sft", "sft": {"data": {"path": "some/rows"}, "training": {"batch_size": 64, "max_steps": 3}}}
    recipe = recipe_of(tmp_path, content)
    works = work_of(recipe, Lengths(row=8))
    seconds = []
    for training in (0.5, 0.25):
        cluster = Cluster(CPU, 1, Architecture.of(SHAPE), Coefficients(training=training))
        result = capacity(works, recipe.resources, cluster)
        assert result.problems == []
        [stage] = result.estimates
        assert stage.peaks == ()
        assert stage.notes[-1].startswith("memory is not estimated on a processor")
        seconds.append(stage.seconds["train"])
    operations = 512 * (OPERATIONS + 3 * 4 * 2 * 64 * 4)
    assert seconds == pytest.approx([operations / 0.5e11, operations / 0.25e11])
