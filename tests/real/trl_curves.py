"""``python -m tests.real.trl_curves``: a pretrained model trains with our stages and with TRL's trainers, step by step.

    python -m tests.real.trl_curves [METHOD …] [--steps N] [--held-out N] [--max-length N] [--model FOLDER]

Both sides start from the same weights and take the same rows of ``REAL_DATA``, or of ``../shared/data``, in the same order, in
fp32. A line of JSON for each method has the loss of every step, the greatest difference, and the metrics of held-out rows
before and after; docs/real-model.md shows the last ones of each method, unless another model is named. Each side is a process
of its own, one at a time. ``tests/real/curve_sides.py`` lists what is configured to be alike.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.evaluation.statistics import wilson
from tests.benchmarks.laps import Taken, sampled_memory
from tests.benchmarks.peer_rows import DATA
from tests.real.curve_sides import BATCH, METHODS, Side, Sizes, of_trl, ours, scored
from tests.real.page import RESULTS, save_trl, trl_table, write_page
from tests.real_model import RealModelError, real_model

CLOSE = 1e-3
"""The greatest difference of a step's losses that rounding explains."""


def absent() -> str:
    """Why nothing can be compared here; empty if it can."""
    if find_spec("trl") is None:
        return "TRL is not installed: install the extra `test`, as `make test` does"
    if not DATA.is_dir():
        return f"there is no {DATA}: let REAL_DATA name the folder with gsm8k and hh-rlhf-harmless"
    return ""


def compare(name: str, model: Path, sizes: Sizes, data: Path = DATA) -> dict[str, Any]:
    """Train a method on both sides."""
    with tempfile.TemporaryDirectory(prefix="curves-", dir="/tmp") as temporary:
        folder = Path(temporary)
        start = model
        if name == "reward-model":
            start, _ = _alone(folder, scored, model, folder / "start")
        own, memory = _alone(folder, ours, name, start, folder / "ours", data, sizes)
        trl = _alone(folder, of_trl, name, start, Path(own.rows), sizes)
        return figures_of(name, model, _rows_of(Path(own.rows) / "test.parquet"), (own, memory), trl)


def figures_of(
    name: str, model: Path, held_out_rows: int, own: tuple[Side, int], trl: tuple[Side, int]
) -> dict[str, Any]:
    """The line of a method, of both sides and the most memory that they had."""
    losses = zip(own[0].losses, trl[0].losses, strict=True)
    return {
        "method": name,
        "model": model.name,
        "batch_size": BATCH,
        "learning_rate": METHODS[name].learning_rate,
        "held_out_rows": held_out_rows,
        "difference": max(abs(of_ours - of_trls) for of_ours, of_trls in losses),
        "ours": _of_side(*own, held_out_rows),
        "trl": _of_side(*trl, held_out_rows),
    }


def _of_side(side: Side, memory: int, held_out_rows: int) -> dict[str, Any]:
    figures = asdict(side)
    del figures["rows"]
    if "accuracy" in side.held_out:
        right = round(side.held_out["accuracy"][1] * held_out_rows)
        interval = wilson(np.arange(held_out_rows) < right, 0.95)
        figures["accuracy_interval"] = [interval.low, interval.high]
    return {**figures, "memory_gb": round(memory / 1e9, 2)}


def _alone(folder: Path, function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Result of a function in a process of its own, and the most bytes that it and its children had."""
    taken = Taken()
    with (
        ProcessPoolExecutor(1, get_context("spawn"), initializer=_quiet, initargs=(folder,)) as pool,
        sampled_memory(pool.submit(os.getpid).result(), taken),
    ):
        result = pool.submit(function, *arguments).result()
    return result, taken.memory


def _quiet(folder: Path) -> None:
    """Leave standard output to the lines of figures, and temporary files to this comparison."""
    os.dup2(2, 1)
    os.environ["TMPDIR"] = str(folder)


def _rows_of(table: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(table).num_rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = ArgumentParser(prog="python -m tests.real.trl_curves")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}; all of them by default")
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="optimiser steps of each method")
    parser.add_argument("--held-out", type=int, default=Sizes.held_out, help="rows of the test set to measure on")
    parser.add_argument("--max-length", type=int, default=Sizes.max_length, help="tokens; longer rows are left out")
    parser.add_argument("--model", type=Path, help="folder of the model; by default SmolLM2-135M-Instruct is made")
    given = parser.parse_args(arguments)
    if unknown := set(given.methods) - set(METHODS):
        parser.error(f"no method {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}")
    if reason := absent():
        sys.exit(f"trl_curves: {reason}")
    try:
        model = given.model or real_model()
    except RealModelError as error:
        sys.exit(str(error))
    sizes = Sizes(given.steps, given.max_length, given.held_out)
    lines = []
    for name in given.methods or METHODS:
        lines.append(compare(name, model, sizes))
        print(json.dumps(lines[-1]), flush=True)
    print("\n".join(trl_table(lines)), file=sys.stderr)
    if given.model is None and all(line["difference"] <= CLOSE for line in lines):
        save_trl(RESULTS, lines)
        write_page()
    if far := [line["method"] for line in lines if line["difference"] > CLOSE]:
        sys.exit(f"trl_curves: losses differ by more than {CLOSE:g}: {', '.join(far)}")


if __name__ == "__main__":
    main()
