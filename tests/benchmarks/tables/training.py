"""Tables of the speed of training, beside TRL, bare PyTorch and bare vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.benchmarks.peer_rows import COMPLETION, COMPLETIONS, PROMPT, PROMPTS
from tests.benchmarks.results import Figure, Line, Run
from tests.benchmarks.tables.markdown import NONE, lines, millions, number, span, table

TRL_SETTINGS = {
    "packed": "packed (`packing`)",
    "by length, 4": "grouped by length, in fours",
    "padded, 16": "padded, all 16 at once (its default)",
    "4": "in fours",
    "1, reference precomputed": "one by one, reference precomputed",
    "16": "micro-batches of 16",
}
"""How the page calls TRL's settings of the benchmarks."""
PAIRS = {
    "made-up": "16 synthetic pairs of 150 + 60 tokens",
    "HH-RLHF": "the first 16 pairs of HH-RLHF of at most 512 bytes",
}
GOALS_BESIDE_TRL = {"sft-fp32": "1.6", "sft-bf16": "2.2", "dpo": "2.5", "grpo": "4"}
PARTS_OF_STAGES = {"training": "training", "forward": "forward passes", "decoding": "sampling"}
"""Names of coefficients in the table."""
BARE, PRODUCT = "bare", "product"
TYPES = {"float32": "fp32", "bfloat16": "bf16"}
PREFIXES = {
    "completions": "4 prompts of 200 tokens, 8 completions of 61 each",
    "pairs": "8 pairs of 150 + 60 tokens",
    "demonstrations": "16 demonstrations of about 125 tokens",
    "short_demonstrations": "128 demonstrations of 17 tokens",
}


def peers(runs: Sequence[Run]) -> str:
    """The setting of TRL that is its fastest first, with the range of its laps."""
    head = ("rows, parameters", "TRL's setting", "seconds: ours, TRL", "ratio of seconds", "ratio of CPU seconds")
    return table(head, (row for line in lines(runs) for row in _peer_rows(line)))


def _peer_rows(line: Line) -> Iterator[list[str]]:
    parameters = millions(line["parameters"])
    if line["method"] == "sft":
        name = f"SFT, {line['rows']} rows of about {line['tokens'] / line['rows']:.0f} tokens, {parameters}"
    elif line["method"] == "dpo":
        name = f"DPO, {PAIRS[line['pairs']]}, {parameters}"
    else:
        rows = f"{PROMPTS} prompts × {COMPLETIONS} completions, {PROMPT} + {COMPLETION} tokens"
        name = f"GRPO, a whole step: {rows}, {parameters}"
    yield from _settings(name, line)
    if "training" in line:
        yield from _settings("GRPO, only the training of that step", line["training"])


def _settings(name: str, figures: Mapping[str, Any]) -> Iterator[list[str]]:
    ours, fastest = figures["seconds"][0], figures["trl_fastest"]
    (low, high), by_setting = figures["spread"], figures["trl_seconds"]
    for setting in sorted(by_setting, key=lambda setting: by_setting[setting][0]):
        theirs = by_setting[setting][0]
        is_fastest = setting == fastest
        title = TRL_SETTINGS[setting] + (", its fastest" if is_fastest and len(by_setting) > 1 else "")
        ratio = f"{low:.2f}, **{figures['ratio']:.2f}**, {high:.2f}" if is_fastest else f"{theirs / ours:.2f}"
        cpu = f"{figures['cpu_ratio']:.2f}" if is_fastest else ""
        yield [name if is_fastest else "", title, f"{number(ours, 1)}, {number(theirs, 1)}", ratio, cpu]


def real_training(runs: Sequence[Run]) -> str:
    """A row for each method of the pretrained model."""
    head = ("part", "ours", "to TRL's fastest", "goal", "to a bare loop", "share of the product, goal 0.75")
    return table((*head, "product, GFLOP/s", "most memory, GB"), map(_real_row, lines(runs)))


def _real_row(line: Line) -> list[str]:
    method, rows = line["method"], line["rows"]
    lap = {part: number(seconds, 1) for part, seconds in line["sides"]["ours"]["seconds"][0].items()}
    if method == "dpo":
        name = f"DPO, {rows} pairs with the passes of the reference"
        ours = f"{lap['all']} s, of which reference {lap['reference']}"
    elif method == "grpo":
        name = f"GRPO, a step of {rows} prompts × 8 × 48 tokens"
        ours = f"{lap['all']} s, of which training {lap['training']}"
    else:
        name = f"SFT in {method.removeprefix('sft-')}, {rows} rows of {line['tokens']:,} tokens"
        ours = f"{line['tokens_per_second']['ours']:.0f} tokens/s"
    to_bare, share = line.get("to_bare"), line.get("ours")
    return [
        name,
        ours,
        _with_cpu(line["ratio"], line["cpu_ratio"]),
        GOALS_BESIDE_TRL[method],
        _with_cpu(to_bare["ratio"], to_bare["cpu_ratio"]) if to_bare else NONE,
        _with_cpu(*share["share"]) if share else NONE,
        number(line.get("product_gflops")),
        _memory(line["sides"]),
    ]


def real_sampling(runs: Sequence[Run]) -> str:
    head = ("part", "ours", "to bare vLLM", "goal", "most memory, GB")
    rows = [
        [
            f"sampling, {line['rows']} prompts × 8 × 48 tokens",
            f"{line['tokens_per_second']['ours']:.0f} tokens/s",
            _with_cpu(line["to_bare"]["ratio"], line["to_bare"]["cpu_ratio"]),
            "0.97",
            _memory(line["sides"]),
        ]
        for line in lines(runs)
    ]
    return table(head, rows)


def _with_cpu(ratio: float, cpu_ratio: float) -> str:
    return f"{ratio:.2f} ({cpu_ratio:.2f})"


def _memory(sides: Mapping[str, Any]) -> str:
    names = {"ours": "ours", BARE: "bare"} | {name: f"TRL {title}" for name, title in TRL_SETTINGS.items()}
    return "; ".join(f"{names[name]} {side['memory_gb']:.1f}" for name, side in sides.items() if name != PRODUCT)


def bare_loop(runs: Sequence[Run]) -> str:
    results = lines(runs)
    size = millions(results[0]["parameters"])
    rows = [
        [
            f"our trainer to a bare PyTorch loop, {size} parameters, same packing",
            span((line["trainer_over_bare_loop"] for line in results), 2),
            "0.9",
        ],
        [
            "packing to padding, mean length about 125 tokens",
            span((line["packed_over_padded"] for line in results), 2),
            NONE,
        ],
    ]
    return table(("comparison", "ratio of speed", "goal"), rows)


def prefixes(runs: Sequence[Run]) -> str:
    results = lines(runs)
    rows = []
    for kind, title in PREFIXES.items():
        same = [line for line in results if line["rows"] == kind]
        difference = max(line["gradient_differs_by"] for line in same)
        rows.append(
            [title, span((line["lines_over_trees"] for line in same), 2), f"{difference:.0e}".replace("e-0", "e-")]
        )
    return table(("rows", "speed-up", "difference of the gradient"), rows)


def head(runs: Sequence[Run]) -> str:
    rows = [
        [
            f"{line['measured']}, {TYPES[line['type']]}, {line['places']:,} places of {line['vocabulary']:,} tokens",
            line["side"].removeprefix("chunks, ") if line["side"] != "chunks" else "any loss",
            *_chunked_and_whole(line),
            number(line["ratio"], 3),
            number(line["bound"]),
        ]
        for line in lines(runs)
    ]
    return table(("measurement", "loss", "in chunks", "whole logits", "ratio", "goal"), rows)


def _chunked_and_whole(line: Line) -> list[str]:
    if "bytes" in line:
        return [f"{line[name] / 1e9:.2f} GB" for name in ("bytes", "whole_bytes")]
    return [f"{number(line[name], 2)} s" for name in ("seconds", "whole_seconds")]


def step_data(runs: Sequence[Run]) -> str:
    results = lines(runs)
    seconds = [span((line[f"{way}_seconds"] for line in results), 2) for way in ("columns", "lists")]
    memory = [number(max(line["peak_mib"][way] for line in results)) for way in ("columns", "lists")]
    rows = [
        ["seconds of one thread", *seconds, span((line["lists_over_columns"] for line in results), 0)],
        [
            "growth of the process's memory (MiB)",
            *memory,
            span((line["peak_mib"]["lists"] / max(1, line["peak_mib"]["columns"]) for line in results), 0),
        ],
    ]
    return table(("cost", "columns", "reference", "ratio"), rows)


def driver(runs: Sequence[Run]) -> str:
    """A row for each kind of reward."""
    head = ("reward", "driver, CPU seconds a step", "its parts", "share of a step on 8 H100", "on 64 H100", "goal")
    rows = []
    for line in lines(runs):
        parts = ", ".join(f"{name} {number(seconds, 2)}" for name, seconds in line["seconds"].items())
        shares = [f"{100 * line[f'share_on_{gpus}_h100']:.1f} %" for gpus in (8, 64)]
        goal = f"at most {100 * line['most']:.0f} %"
        rows.append([f"a {line['reward']}", number(line["total_seconds"], 1), parts, *shares, goal])
    return table(head, rows)


def capacity(runs: Sequence[Run]) -> str:
    """A row for each stage and coefficient."""
    head = ("stage", "part", "predicted / measured, by processor time", "by the clock", "goal")
    return table(
        head,
        (
            [
                f"`{line['stage']}`",
                PARTS_OF_STAGES[line["coefficient"]],
                number(line["predicted_by_measured"], 2),
                number(line["by_clock"], 2),
                "0.75 to 1.25",
            ]
            for line in lines(runs)
            if "stage" in line
        ),
    )


FIGURES = (
    Figure("peers", "training beside TRL, tiny models", ("python -m tests.benchmarks peers",), 12, peers),
    Figure(
        "real-training",
        "training a pretrained model beside TRL and a bare loop",
        (
            "python -m tests.benchmarks real sft-fp32 sft-bf16 dpo --rows 16 --laps 1",
            "python -m tests.benchmarks real grpo --rows 8 --laps 1",
        ),
        25,
        real_training,
    ),
    Figure(
        "real-sampling",
        "sampling of a pretrained model beside bare vLLM",
        ("python -m tests.benchmarks real generation --rows 16 --laps 1",),
        4,
        real_sampling,
    ),
    Figure(
        "training", "the trainer beside a bare loop", ("python -m tests.benchmarks training",), 6, bare_loop, runs=2
    ),
    Figure("prefixes", "shared prefixes in training", ("python -m tests.benchmarks prefixes",), 6, prefixes, runs=2),
    Figure(
        "head",
        "log-probabilities in chunks of places",
        ("python -m tests.benchmarks head",),
        4,
        head,
        exit_codes=(0, 1),
    ),
    Figure("step-data", "data of a step of RL", ("python -m tests.benchmarks step_data",), 2, step_data, runs=2),
    Figure(
        "driver",
        "the driver's share of a step of RL",
        ("python -m tests.benchmarks driver",),
        6,
        driver,
        exit_codes=(0, 1),
    ),
    Figure(
        "capacity",
        "predictions of `align plan --like`",
        ("python -m tests.benchmarks capacity",),
        8,
        capacity,
        exit_codes=(0, 1),
    ),
)
