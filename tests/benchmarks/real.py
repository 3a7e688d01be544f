"""A real pretrained model beside TRL, a bare loop of PyTorch and bare vLLM, on the same rows, each with the whole machine.

    python -m tests.benchmarks real [PART …] [--laps N] [--rows N] [--model FOLDER]

One side is in memory at a time, in turn with the others; each measured lap is the second one of new processes. Rows are those
of ``REAL_DATA``, or of ``../shared/data``. Shares are of the product of two large matrices by the same cores in the same
session, by seconds and by CPU seconds: ``share`` counts 6 · parameters · tokens, ``computed`` leaves out the vocabulary where
no token is a target. CPU seconds vary less while others use the machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.bare_side import PRODUCTS, SIZE, bare_sft, bare_vllm, product
from tests.benchmarks.laps import LAPS, Rows, Runner, Taken, compare
from tests.benchmarks.our_side import our_engines, our_rl, our_trainer
from tests.benchmarks.peer_rows import BATCH, DATA, gsm8k, hh_pairs
from tests.benchmarks.peers import MISSING, ratios
from tests.benchmarks.trl_side import trl_dpo, trl_grpo, trl_sft
from tests.real_model import real_model

CORES = len(os.sched_getaffinity(0))
ROWS = {"sft-fp32": 64, "sft-bf16": 64, "dpo": 32, "grpo": 8, "generation": 16}
"""Parts, and the rows, pairs or prompts of each."""
COMPLETIONS, LENGTH = 8, 48
"""Of each prompt, and the tokens of each."""
BARE, PRODUCT = "bare", "product"
OURS: dict[str, Any] = {"resources": {}}
"""The settings of a user who sets none."""


def sides(part: str, rows: Rows, stop: int) -> list[Runner]:
    """Ours first."""
    sizes = {"completions": COMPLETIONS, "length": LENGTH, "stop_ids": [stop]}
    if part == "dpo":
        return [
            Runner("ours", our_trainer, OURS),
            Runner("1, reference precomputed", trl_dpo, {"micro_batch": 1, "precompute": True}),
        ]
    if part == "grpo":
        return [
            Runner("ours", our_rl, {**OURS, **sizes, "steps": 2}),
            Runner("16", trl_grpo, {**sizes, "micro_batch": 16}),
        ]
    if part == "generation":
        from alignment_core.inference.engine import BY_DEVICE

        options = {**BY_DEVICE["cpu"], "kv_cache_memory_bytes": 1 << 28, "logprobs_mode": "processed_logprobs"}
        return [
            Runner("ours", our_engines, {**OURS, **sizes, "shard": len(rows)}),
            Runner(BARE, bare_vllm, {**sizes, "options": options}),
        ]
    bf16 = {"bf16": part == "sft-bf16"}
    return [
        Runner("ours", our_trainer, {**OURS, **bf16}),
        Runner("by length, 4", trl_sft, {"micro_batch": 4, "train_sampling_strategy": "group_by_length", **bf16}),
        Runner("packed", trl_sft, {"micro_batch": 1, "batch": 8, "packing": True, **bf16}),
        Runner(BARE, bare_sft, bf16),
        Runner(PRODUCT, product, bf16),
    ]


def figures(part: str, rows: Rows, taken: Mapping[str, Taken], sizes: tuple[int, int]) -> dict[str, Any]:
    """Ratios of laps, above 1 where ours is faster, and the seconds and memory of all sides."""
    trl = {name: side for name, side in taken.items() if name not in (BARE, PRODUCT)}
    result: dict[str, Any] = {"rows": len(rows), **tokens_of(part, rows)}
    if len(trl) > 1:
        result |= {name: value for name, value in ratios(trl).items() if "seconds" not in name}
    if part == "grpo":
        result |= {
            "training_ratio": ratios(trl, "training")["ratio"],
            "sampling_ratio": ratios(_sampling(trl))["ratio"],
        }
    if BARE in taken:
        to_bare = ratios({name: taken[name] for name in ("ours", BARE)})
        result["to_bare"] = {name: to_bare[name] for name in ("ratio", "spread", "cpu_ratio", "cpu_spread")}
    if PRODUCT in taken:
        speed = 2 * SIZE**3 * PRODUCTS / _median(taken[PRODUCT])
        parameters, vocabulary = sizes
        result["product_gflops"] = round(speed[0] / 1e9)
        for name in ("ours", BARE):
            seconds = _median(taken[name])
            of_targets = (parameters - vocabulary) * result["tokens"] + vocabulary * result["targets"]
            shares = {"share": parameters * result["tokens"], "computed": of_targets}
            result[name] = {share: (6 * count / seconds / speed).round(3).tolist() for share, count in shares.items()}
    if "tokens" in result:
        result["tokens_per_second"] = {
            name: round(result["tokens"] / _median(side)[0], 1) for name, side in taken.items() if name != PRODUCT
        }
    result["sides"] = {
        name: {
            "seconds": [{part: round(float(times[0]), 2) for part, times in lap.items()} for lap in side.laps],
            "cpu_seconds": [round(float(lap["all"][1]), 2) for lap in side.laps],
            "memory_gb": round(side.memory / 1e9, 2),
        }
        for name, side in taken.items()
    }
    return result


def tokens_of(part: str, rows: Rows) -> dict[str, int]:
    if part == "generation":
        return {"tokens": len(rows) * COMPLETIONS * LENGTH}
    if part in ("dpo", "grpo"):
        return {}
    return {"tokens": sum(len(r["input_ids"]) for r in rows), "targets": sum(sum(r["loss_mask"]) for r in rows)}


def _sampling(laps: Mapping[str, Taken]) -> dict[str, Taken]:
    """What is not training, as whole laps."""
    return {name: Taken([{"all": lap["all"] - lap["training"]} for lap in side.laps]) for name, side in laps.items()}


def _median(side: Taken) -> np.ndarray:
    """Of its seconds and CPU seconds. [2]"""
    return np.asarray(np.median([lap["all"] for lap in side.laps], axis=0))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(prog="python -m tests.benchmarks real")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(ROWS)}; all of them by default")
    parser.add_argument("--laps", type=int, default=LAPS, help="measured laps of each side")
    parser.add_argument("--rows", type=int, help="rows, pairs or prompts of a part; by default those of the docs")
    parser.add_argument("--model", type=Path, help="folder of the model; by default SmolLM2-135M-Instruct is made")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(ROWS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if given.rows and given.rows % BATCH and not {*(given.parts or ROWS)} <= {"grpo", "generation"}:
        parser.error(f"--rows: SFT and DPO train in steps of {BATCH} rows, so give a multiple of {BATCH}")
    if find_spec("trl") is None:
        sys.exit(MISSING)
    if not DATA.is_dir():
        sys.exit(f"real: there is no {DATA}; let REAL_DATA name the folder with gsm8k and hh-rlhf-harmless")
    from transformers import AutoConfig, AutoTokenizer

    from alignment_core.cluster.device import cpu_model

    model = given.model or real_model()
    tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    sizes = (parameters_of(model), config.vocab_size * config.hidden_size)
    os.environ["OMP_NUM_THREADS"] = str(CORES)
    machine = {"model": model.name, "machine": cpu_model(), "cores": CORES}
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        os.environ["TMPDIR"] = folder  # of the sides
        for part in given.parts or ROWS:
            count = given.rows or ROWS[part]
            rows = (
                hh_pairs(lambda text: tokenizer(text)["input_ids"], count) if part == "dpo" else gsm8k(tokenizer, count)
            )
            taken = compare(model, rows, sides(part, rows, tokenizer.eos_token_id), given.laps, CORES, apart=True)
            when = datetime.now(UTC).isoformat(timespec="minutes")
            line = {"method": part, **machine, "date": when, **figures(part, rows, taken, sizes)}
            print(json.dumps(line), flush=True)


def parameters_of(model: Path) -> int:
    """Of the stored weights, which have tied ones once."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as weights:
        return sum(int(np.prod(weights.get_slice(name).get_shape())) for name in weights.keys())  # noqa: SIM118


if __name__ == "__main__":
    main()
