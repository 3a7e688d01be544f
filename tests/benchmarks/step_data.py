"""The overhead of a step of reinforcement learning: from an engine's lists to a rank's rows.

The reference does the same with a Python object for each token, and takes the step's data to the ranks twice through a
file, as this project did before.
"""

from __future__ import annotations

import json
import pickle
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from vllm.logprobs import FlatLogprobs, Logprob

from alignment_core.environments.episode import Episode
from alignment_core.inference.completions import Completions
from alignment_core.inference.request_queue import _completion
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig
from alignment_core.rollout.advantages import add_advantages
from alignment_core.rollout.rollout import to_batch
from tests.rollout.rollouts import rollout

GROUPS, SIZE, PROMPT, TOKENS, REPEATS = 128, 8, 200, 2048, 3
NUMBERS = ("old_logps", "reference_logps", "old_values")
GAMMA, LAMBDA, COEFFICIENT = 1.0, 0.95, 0.05


def main() -> None:
    random = np.random.default_rng(0)
    prompts = [{"prompt_ids": random.integers(0, 1000, PROMPT).tolist()} for _ in range(GROUPS)]
    ids = [random.integers(0, 1000, TOKENS).tolist() for _ in range(GROUPS * SIZE)]
    rewards, groups = random.normal(size=len(ids)).tolist(), [number // SIZE for number in range(len(ids))]
    flat = [_output(ids_of_prompt, FlatLogprobs(logprobs=[-1.5] * TOKENS)) for ids_of_prompt in ids]
    nested = [_output(ids_of_prompt, [{token: Logprob(-1.5, 1)} for token in ids_of_prompt]) for ids_of_prompt in ids]
    values = np.full(len(ids) * TOKENS, -1.5, np.float32)
    seconds: dict[str, list[float]] = {"columns": [], "lists": []}
    grown: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for _ in range(REPEATS):
            for name, step in (
                ("columns", lambda: _columns(flat, prompts, rewards, groups, values)),
                ("lists", lambda: _lists(nested, prompts, rewards, groups, values, Path(folder) / "step.parquet")),
            ):
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                seconds[name].append(_timed(step))
                grown.setdefault(name, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    ratios = [lists / columns for columns, lists in zip(seconds["columns"], seconds["lists"], strict=True)]
    medians = {f"{name}_seconds": round(statistics.median(times), 3) for name, times in seconds.items()}
    print(
        json.dumps(
            {
                "completions": len(ids),
                "tokens": TOKENS,
                **medians,
                "peak_mib": grown,
                "lists_over_columns": round(statistics.median(ratios), 1),
            }
        )
    )


def _output(ids: list[int], logprobs: Any) -> Any:
    return SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length")


def _sent(data: Any) -> Any:
    """As another process gets it from Ray: arrays are copied once, into memory that both see."""
    arrays: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(data, protocol=5, buffer_callback=arrays.append)
    return pickle.loads(rest, buffers=[bytes(array.raw()) for array in arrays])


def _columns(
    outputs: list[Any], prompts: list[Any], rewards: list[float], groups: list[int], values: np.ndarray
) -> None:
    completions = _sent(Completions.of([_completion(output, 3) for output in outputs]))
    rows = []
    for number, completion in enumerate(completions.each()):
        prompt = prompts[number // SIZE]
        episode = Episode(number // SIZE, number % SIZE, number // SIZE, prompt, TOKENS)
        episode.append_turn(completion)
        rows.append(
            rollout(
                episode.mask.tolist(),
                prompt_ids=prompt["prompt_ids"],
                completion_ids=episode.ids,
                logps=episode.logps,
                group=groups[number],
            )
        )
    data = to_batch(rows)
    on_rank = _sent(data)
    on_rank.rows()
    data.numbers.update(_sent(dict.fromkeys(NUMBERS, values)))
    estimator = AdvantageConfig(estimator="gae", gamma=GAMMA, gae_lambda=LAMBDA)
    kl = KlConfig(coefficient=COEFFICIENT, place="reward", estimator="k1")
    add_advantages(data, rewards, estimator, kl, COEFFICIENT)
    on_rank.numbers.update(_sent({name: data.numbers[name] for name in ("advantages", "returns")}))


def _lists(
    outputs: list[Any], prompts: list[Any], rewards: list[float], groups: list[int], values: np.ndarray, file: Path
) -> None:
    rows = []
    for number, output in enumerate(
        _sent(
            [
                (
                    output.token_ids,
                    [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)],
                )
                for output in outputs
            ]
        )
    ):
        ids, logps = output
        rows.append(
            {
                "prompt_ids": prompts[number // SIZE]["prompt_ids"],
                "completion_ids": list(ids),
                "mask": [True] * len(ids),
                "rollout_logps": list(logps),
            }
        )
    read = _through(rows, file)
    by_row = np.split(values, len(rows))
    for name in NUMBERS:
        for row, received in zip(rows, _sent(by_row), strict=True):
            row[name] = received.tolist()
    for row, reward in zip(rows, rewards, strict=True):
        advantages, later, following = [0.0] * len(row["mask"]), 0.0, 0.0
        for place in reversed(range(len(advantages))):
            penalty = COEFFICIENT * (row["old_logps"][place] - row["reference_logps"][place])
            earned = (reward if place == len(advantages) - 1 else 0.0) - penalty
            later = earned + GAMMA * following - row["old_values"][place] + GAMMA * LAMBDA * later
            following = row["old_values"][place]
            advantages[place] = later
        row["advantages"] = advantages
        row["returns"] = [advantage + value for advantage, value in zip(advantages, row["old_values"], strict=True)]
    read = _through(rows, file)
    for row in read:
        np.array([*row["prompt_ids"], *row["completion_ids"]])
        for name in (*NUMBERS, "advantages", "returns"):
            np.asarray(row[name], np.float32)


def _through(rows: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    read: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return read


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
