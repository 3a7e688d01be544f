"""Tables of engines, weight updates and reward processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.benchmarks.results import Figure, Line, Run
from tests.benchmarks.tables.markdown import NONE, lines, millions, number, span, table

HEAD = ("measurement", "result", "goal")


def engine(runs: Sequence[Run]) -> str:
    results = lines(runs)
    size = millions(results[0]["parameters"])
    rows = [
        [
            f"speed of the stage's engine relative to plain `vllm.LLM.generate`, {size} parameters",
            span(line["stage_over_plain_generate"] for line in results),
            "0.95",
        ],
        [
            f"weight update of a running engine, {size} parameters",
            f"{span(line['weight_update_seconds'] for line in results)} s",
            NONE,
        ],
    ]
    return table(HEAD, rows)


def reinforcement(runs: Sequence[Run]) -> str:
    results = lines(runs)
    steps = [line for line in results if "reward_delay_seconds" in line]
    transfers = [line for line in results if "parameters" in line]
    synchronous, asynchronous = (
        span((line[f"step_{way}_seconds"] for line in steps), 2) for way in ("in_turn", "ahead")
    )
    step = f"a step with a reward that takes {steps[0]['reward_delay_seconds']} s: synchronous, asynchronous sampling"
    faster = span((line["in_turn_over_ahead"] for line in steps), 1)
    rows = [
        [step, f"{synchronous} s, {asynchronous} s ({faster} times as fast)", NONE],
        _transfer(f"{millions(transfers[0]['parameters'])} parameters", transfers, NONE),
    ]
    return table(HEAD, rows)


def weight_update(runs: Sequence[Run]) -> str:
    results = lines(runs)
    by_themselves = [line for line in results if "channel" in line]
    rows = [
        [
            f"{mib} MiB through the channel `{kind}` by itself",
            f"{span((line['seconds_per_gib'] for line in of_kind), 2)} s per GiB; CPU seconds per GiB: sender "
            f"{span((line['sender_processor_seconds_per_gib'] for line in of_kind), 2)}, receiver "
            f"{span((line['receiver_processor_seconds_per_gib'] for line in of_kind), 2)}; CPU seconds of the driver: "
            f"{span((line['driver_processor_seconds'] for line in of_kind), 3)}",
            "0.5 s per GiB" if kind == "memory" else NONE,
        ]
        for kind, mib in dict.fromkeys((line["channel"], line["mib"]) for line in by_themselves)
        if (of_kind := [line for line in by_themselves if (line["channel"], line["mib"]) == (kind, mib)])
    ]
    transfers = [line for line in results if "channel" not in line]
    return table(HEAD, [*rows, _transfer("SmolLM2-135M-Instruct", transfers, "0.4 s")])


def _transfer(name: str, results: Sequence[Line], goal: str) -> list[str]:
    transfer = f"transfer of {name} in fp32 to a running engine"
    if "memory_seconds" in results[0]:
        kinds = ("memory", "broadcast", "ray")
        times = ", ".join(f"{span((line[f'{kind}_seconds'] for line in results), 2)} s ({kind})" for kind in kinds)
        slower = span((line["folder_over_memory"] for line in results), 1)
        return [transfer, f"{times}; through a folder {slower} times as long as through memory", goal]
    # Results from before there were channels.
    seconds, cpu = (span((line.get(f"bucketed_{kind}seconds") for line in results), 2) for kind in ("", "processor_"))
    slow = [span((line[f"{way}_over_bucketed"] for line in results), 1) for way in ("per_parameter", "folder")]
    took = f"{seconds} s" if cpu == NONE else f"{seconds} s, {cpu} CPU seconds"
    result = f"{took}; one parameter at a time {slow[0]} times as long, through a folder {slow[1]}"
    return [f"{transfer}, in {results[0]['buckets']} buckets", result, goal]


def rewards(runs: Sequence[Run]) -> str:
    (line,) = lines(runs)
    assert line["same"], "scores differ between numbers of processes"
    rows = [
        ["1", number(line["warm_1"]), "1"],
        ["8", number(line["warm_8"]), number(line["warm_ratio"], 1)],
        ["8, including their start", number(line["first_8"]), number(line["first_ratio"], 1)],
    ]
    return table(("processes", "seconds", "speed-up"), rows)


def _benchmark(*names: str) -> tuple[str, ...]:
    return tuple(f"python -m tests.benchmarks {name}" for name in names)


FIGURES: Iterable[Figure] = (
    Figure("engine", "the stage's engine beside plain vLLM", _benchmark("generation"), 2, engine),
    Figure(
        "reinforcement", "asynchronous sampling, transfer of weights", _benchmark("reinforcement"), 3, reinforcement
    ),
    Figure(
        "weight-update",
        "transfer of a pretrained model's weights",
        _benchmark("channels", "weight_update"),
        2,
        weight_update,
        runs=3,
    ),
    Figure("rewards", "processes of a verifier", _benchmark("rewards"), 1, rewards),
)
