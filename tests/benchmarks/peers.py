"""TRL's trainers beside ours: the same weights, rows and threads, in turn, in one run.

Each side is a process of its own that takes a lap whenever it is told to, so that drift of the machine hits all alike. TRL
runs with several of its settings; the ratio is to the fastest.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from alignment_core.recipes import ResourcesConfig, ScratchModel

LAPS = 3
"""That are measured; each side takes one more first."""
BATCH = 16
"""Rows, or pairs, of an optimiser step. A lap is two steps of SFT, one of DPO or one of GRPO."""
PROMPTS, COMPLETIONS, PROMPT, COMPLETION = 16, 8, 200, 61
"""Of a step of GRPO: prompts, completions of each, and the tokens of both."""
LONGEST = 512
SIDES = ("chosen_ids", "rejected_ids")
LARGE = ScratchModel(hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8)
SMALL = ScratchModel(
    hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, tie_word_embeddings=False
)
RESOURCES = ResourcesConfig(device="cpu", trainers=1, engines=1, wait_timeout_seconds=600)
HH = Path(__file__).resolve().parents[3] / "shared" / "data" / "hh-rlhf-harmless" / "train.jsonl"
MISSING = "TRL is not installed here: install the extra `test`, as `make test` does"

Rows = list[dict[str, Any]]
Times = dict[str, np.ndarray]
"""By what took it; ``all`` is the whole lap. [2] each: seconds, and CPU seconds of all processes of the side."""
NO_TIME = np.zeros(2)


class Clock:
    """Begins when it is made."""

    def __init__(self) -> None:
        self.began = self._now()

    def _now(self) -> np.ndarray:
        me = psutil.Process()
        cpu = 0.0
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                its = process.cpu_times()
                cpu += its.user + its.system
        return np.array([time.perf_counter(), cpu])

    def passed(self) -> np.ndarray:
        return self._now() - self.began


class Laps:
    """In a side's process: says when a lap is over, and waits until the next one is to begin."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.parts: Times = {}
        """Of the lap that is under way."""
        self._wait()

    def _wait(self) -> None:
        self.line.recv()
        self.parts, self.started = {}, Clock()

    def over(self) -> None:
        self.line.send({"all": self.started.passed(), **self.parts})
        self._wait()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose seconds count for ``part`` of the lap."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            started = Clock()
            try:
                return function(*arguments, **options)
            finally:
                self.parts[part] = self.parts.get(part, NO_TIME) + started.passed()

        return wrapped


Side = Callable[[Laps, Path, Rows, Mapping[str, Any]], None]
"""Takes laps for as long as it is asked: with the folder of a model, rows and settings."""


@dataclass(frozen=True)
class Runner:
    """A side, and how it is set."""

    name: str
    side: Side
    settings: Mapping[str, Any]


def compare(model: Path, rows: Rows, runners: Sequence[Runner]) -> dict[str, list[Times]]:
    """The measured laps of all runners, taken in turn."""
    context = get_context("spawn")
    lines, processes = {}, []
    for runner in runners:
        lines[runner.name], theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, runner, model, rows), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
    laps: dict[str, list[Times]] = {runner.name: [] for runner in runners}
    try:
        for number in range(LAPS + 1):
            for name, line in lines.items():
                line.send(None)
                lap = line.recv()
                if number:
                    laps[name].append(lap)
    finally:
        for line in lines.values():
            line.close()
        for process in processes:
            process.join()
    return laps


def _serve(line: Connection, runner: Runner, model: Path, rows: Rows) -> None:
    os.dup2(2, 1)  # what trainers print is none of our lines
    import torch

    torch.set_num_threads(RESOURCES.threads)
    try:
        runner.side(Laps(line), model, rows, runner.settings)
    except EOFError:  # no further lap is wanted
        return


# --- ours ---------------------------------------------------------------------------------------------------------------


def our_trainer(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """SFT or DPO, with the passes of the reference: all rows, in steps of ``BATCH``, are a lap."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from alignment_core.artifacts import Reference
    from alignment_core.cluster.device import Device
    from alignment_core.cluster.group import call
    from alignment_core.models.handle import Model
    from alignment_core.recipes import DpoLossConfig, TrainingConfig
    from alignment_core.training.forward import ForwardJob
    from alignment_core.training.methods.dpo import Dpo
    from alignment_core.training.methods.sft import Sft
    from alignment_core.training.trainer import Trainer, TrainJob
    from alignment_core.training.worker import TrainWorker

    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=model.parent))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    device = Device.detect("cpu")
    worker = TrainWorker(0, 1, f"file://{folder}/meet", RESOURCES, device)
    training = TrainingConfig(batch_size=BATCH, num_train_epochs=1000, lr_scheduler_type="constant")
    policy = Model(model, Reference("model", "0" * 64))
    method: Any = Sft()
    logps, pairs = "", [(row["prompt_ids"], row[side]) for row in rows for side in SIDES if side in row]
    reference = ForwardJob(policy, "lm").open(RESOURCES, device)
    if pairs:
        method, logps = Dpo(DpoLossConfig()), str(folder / "logps.parquet")
        chosen, rejected = reference.run(pairs).reshape(-1, 2).T
        table = {
            "split": ["train"] * len(rows),
            "row": range(len(rows)),
            "chosen_logp": chosen,
            "rejected_logp": rejected,
        }
        pq.write_table(pa.table(table), logps)
    train_data = str(folder / "train.parquet")
    worker.open(TrainJob(method, policy, logps or None, train_data, None, training, 0), RESOURCES)
    worker.do(call(Trainer.prepare, str(folder)))
    while True:
        if pairs:
            laps.timed("reference", reference.run)(pairs)
        laps.timed("training", worker.do)(call(Trainer.train, len(rows) // BATCH, 1e9))
        laps.over()


def our_rl(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """Steps of the whole stage: an engine samples, a trainer trains, each in an actor of its own."""
    import pyarrow as pa

    from alignment_core.execution.machines import WarmMachines
    from alignment_core.training.policy_ranks import PolicyRanks
    from tests.stages.rl_runs import run_rl

    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=model.parent))
    (folder / "reward.py").write_text(
        'def distinct(rows):\n    return [float(len(set(row["completion"]))) for row in rows]\n'
    )
    section = {
        "prompts": {"task": "reverse", "rows": 8},
        "steps": LAPS + 1,
        "prompts_per_step": PROMPTS,
        "generation": {"num_generations": COMPLETIONS, "max_completion_length": COMPLETION},
        "rewards": [{"function": f"{folder / 'reward.py'}:distinct"}],
        "advantage": {"estimator": "group", "divide_by_deviation": True},
        "training": {"batch_size": PROMPTS * COMPLETIONS, "lr_scheduler_type": "constant", "learning_rate": 1e-6},
    }
    PolicyRanks.update = laps.timed("training", PolicyRanks.update)  # type: ignore[method-assign]

    def report(done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None:
        if done:
            assert metrics["completion_length"] == COMPLETION
            with suppress(EOFError):  # after the last step the stage ends by itself
                laps.over()

    table = pa.Table.from_pylist([{**row, "label": None, "task": None} for row in rows])
    machines = WarmMachines(RESOURCES, folder)
    try:
        run_rl(folder / "run", model, section, lambda _: machines, RESOURCES, report, rows=table)
    finally:
        machines.close()


# --- TRL's --------------------------------------------------------------------------------------------------------------


def _each_lap(laps: Laps, steps: int) -> Any:
    """A callback that says after so many optimiser steps that a lap is over."""
    from transformers import TrainerCallback

    class EachLap(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % steps == 0:
                laps.over()

    return EachLap()


def _arguments(model: Path, micro_batch: int, batch: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """What all of TRL's trainers are told: fp32, and nothing beside training."""
    return {
        "output_dir": str(model.parent / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // micro_batch,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 1000,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }


def _load(model: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return weights, AutoTokenizer.from_pretrained(model)


def trl_sft(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    more = dict(settings)
    arguments = _arguments(model, more.pop("micro_batch"), more.pop("batch", BATCH), {"max_length": LONGEST, **more})
    weights, tokenizer = _load(model)
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])
    trainer = SFTTrainer(weights, SFTConfig(**arguments), train_dataset=data, processing_class=tokenizer)
    per_step = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    trainer.add_callback(_each_lap(laps, -(-len(trainer.train_dataset) // per_step)))
    trainer.train()


def trl_dpo(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """With ``precompute_ref_log_probs`` the passes of the reference, over the rows of a lap, count once for each lap."""
    from datasets import Dataset, disable_caching
    from trl import DPOConfig, DPOTrainer

    disable_caching()
    own = [{name: row[name] for name in ("prompt_ids", "chosen_ids", "rejected_ids")} for row in rows]
    arguments = _arguments(model, settings["micro_batch"], BATCH, {"max_length": LONGEST})
    precompute = settings.get("precompute", False)

    class Timed(DPOTrainer):  # type: ignore[misc]
        """Tokens are given; the passes of the reference are timed."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, *given: Any, **options: Any) -> Any:
            return laps.timed("reference", super()._precompute_ref_logps)(*given, **options)

    weights, tokenizer = _load(model)
    reference = None if precompute else _load(model)[0]
    config = DPOConfig(**arguments, precompute_ref_log_probs=precompute)
    trainer = Timed(weights, reference, config, train_dataset=Dataset.from_list(own), processing_class=tokenizer)
    trainer.add_callback(_each_lap(laps, len(rows) // BATCH))
    passes = laps.parts.get("reference", NO_TIME)
    over = laps.over

    def with_passes() -> None:
        laps.started.began -= passes  # they came before the first lap, and count for each
        over()

    laps.over = with_passes  # type: ignore[method-assign]
    laps.started = Clock()
    trainer.train()


def trl_grpo(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    """Its ``training`` is what is not sampling and rewarding."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def distinct(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert {len(ids) for ids in completion_ids} == {COMPLETION}
        return [float(len(set(completion))) for completion in completions]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, *given: Any) -> Any:
            return laps.timed("sampling", super()._prepare_inputs)(*given)

    more = {
        "num_generations": COMPLETIONS,
        "max_completion_length": COMPLETION,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "loss_type": "dapo",
    }
    weights, tokenizer = _load(model)
    config = GRPOConfig(**_arguments(model, settings["micro_batch"], PROMPTS * COMPLETIONS, more))
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    trainer = Timed(weights, distinct, config, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(_each_lap(laps, 1))
    over = laps.over

    def with_training() -> None:
        laps.parts["training"] = laps.started.passed() - laps.parts["sampling"]
        over()

    laps.over = with_training  # type: ignore[method-assign]
    trainer.train()


# --- rows ---------------------------------------------------------------------------------------------------------------


def demonstrations() -> Rows:
    """Of about 125 tokens, every one a target."""
    source = random.Random(0)
    lengths = [max(16, min(LONGEST, int(source.lognormvariate(4.6, 0.7)))) for _ in range(2 * BATCH)]
    return [{"input_ids": [source.randrange(256) for _ in range(n)], "loss_mask": [1] * n} for n in lengths]


def made_up_pairs() -> Rows:
    """150 tokens, and two completions of 60."""
    source = random.Random(0)
    lengths = {"prompt_ids": 150, "chosen_ids": 60, "rejected_ids": 60}
    return [
        {**{name: [source.randrange(256) for _ in range(n)] for name, n in lengths.items()}, "margin": None}
        for _ in range(BATCH)
    ]


def hh_pairs() -> Rows:
    """The first pairs of HH-RLHF that fit, in bytes."""
    rows: Rows = []
    for line in HH.read_text().splitlines():
        pair = json.loads(line)
        (prompt, _, chosen), (same, _, rejected) = (
            pair[name].rpartition("\n\nAssistant:") for name in ("chosen", "rejected")
        )
        ids = [list(text.encode()) for text in (f"{prompt}\n\nAssistant:", chosen, rejected)]
        if prompt == same and chosen and rejected and len(ids[0]) + max(map(len, ids[1:])) <= LONGEST:
            rows.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), ids, strict=True)) | {"margin": None})
        if len(rows) == BATCH:
            break
    return rows


def prompts() -> Rows:
    from alignment_core.models.tokenizer import byte_tokenizer

    source, tokenizer = random.Random(0), byte_tokenizer()
    texts = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT)) for _ in range(PROMPTS)]
    return [
        {"prompt": text, "prompt_ids": tokenizer(text)["input_ids"], "source": f"rows:{number}"}
        for number, text in enumerate(texts)
    ]


def make_endless(model: Path) -> None:
    """Let a model with a head of its own sample EOS with a probability of about e^-15: completions have their full length.

    Its states get a component that is the same everywhere, which only EOS's row of the head looks at.
    """
    import torch

    weights, tokenizer = _load(model)
    with torch.no_grad():
        weights.get_input_embeddings().weight[:, 0] = 1.0
        head = weights.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[tokenizer.eos_token_id, 0] = -1.0
    weights.save_pretrained(model)


# --- what is measured ---------------------------------------------------------------------------------------------------


def ratios(laps: Mapping[str, Sequence[Times]], part: str = "all") -> dict[str, Any]:
    """Seconds of all, and how many times as long TRL's fastest takes: the median, and the least and most of the laps.

    ``cpu_ratio`` is the same for CPU seconds, which vary less while others use the machine.
    """
    times = {name: np.array([lap[part] for lap in taken]) for name, taken in laps.items()}
    ours = times.pop("ours")
    best = min(times, key=lambda name: float(np.median(times[name][:, 1])))
    by_lap = times[best] / ours
    found: dict[str, Any] = {"ratio": 0.0, "spread": [], "cpu_ratio": 0.0, "cpu_spread": []}
    for values, name in zip(by_lap.T, ("", "cpu_"), strict=True):
        found[f"{name}ratio"] = round(float(np.median(values)), 2)
        found[f"{name}spread"] = [round(float(values.min()), 2), round(float(values.max()), 2)]
    medians = {name: np.median(values, axis=0).round(2).tolist() for name, values in times.items()}
    return {**found, "seconds": np.median(ours, axis=0).round(2).tolist(), "trl_seconds": medians, "trl_fastest": best}


def sft(folder: Path) -> Iterator[dict[str, Any]]:
    model, rows = folder / "sft", demonstrations()
    parameters = create(LARGE, model)
    laps = compare(model, rows, [Runner("ours", our_trainer, {}), *SFT])
    tokens = sum(len(row["input_ids"]) for row in rows)
    what = {"method": "sft", "parameters": parameters, "rows": len(rows), "tokens": tokens}
    yield {**what, **ratios(laps), **settings_of(SFT)}


def dpo(folder: Path) -> Iterator[dict[str, Any]]:
    model = folder / "dpo"
    parameters = create(LARGE, model)
    pairs = {"made-up": made_up_pairs()}
    if HH.is_file():
        pairs["HH-RLHF"] = hh_pairs()
    else:
        print("dpo: made-up pairs alone, because ../shared/data (HH-RLHF) is not here", file=sys.stderr)
    for name, rows in pairs.items():
        laps = compare(model, rows, [Runner("ours", our_trainer, {}), *DPO])
        tokens = sum(2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows)
        what = {"method": "dpo", "pairs": name, "parameters": parameters, "rows": len(rows), "tokens": tokens}
        yield {**what, **ratios(laps), **settings_of(DPO)}


def grpo(folder: Path) -> Iterator[dict[str, Any]]:
    model, rows = folder / "grpo", prompts()
    parameters = create(SMALL, model)
    make_endless(model)
    laps = compare(model, rows, [Runner("ours", our_rl, {}), *GRPO])
    completions = PROMPTS * COMPLETIONS
    what = {
        "method": "grpo",
        "parameters": parameters,
        "rows": completions,
        "tokens": completions * (PROMPT + COMPLETION),
    }
    yield {**what, **ratios(laps), "training": ratios(laps, "training"), **settings_of(GRPO)}


def settings_of(runners: Sequence[Runner]) -> dict[str, Any]:
    return {"trl_settings": {runner.name: dict(runner.settings) for runner in runners}}


def create(shape: ScratchModel, model: Path) -> int:
    from alignment_core.models.scratch import create_model

    return create_model(shape, None, 0, model)


SFT = [
    Runner("padded, 16", trl_sft, {"micro_batch": 16}),
    Runner("by length, 4", trl_sft, {"micro_batch": 4, "train_sampling_strategy": "group_by_length"}),
    Runner("packed", trl_sft, {"micro_batch": 1, "batch": 4, "packing": True}),
]
DPO = [
    Runner("4", trl_dpo, {"micro_batch": 4}),
    Runner("1, reference precomputed", trl_dpo, {"micro_batch": 1, "precompute": True}),
]
GRPO = [Runner("16", trl_grpo, {"micro_batch": 16})]


def main() -> None:
    if find_spec("trl") is None:
        sys.exit(MISSING)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        for method in (sft, dpo, grpo):
            for found in method(Path(folder)):
                print(json.dumps({**found, "threads": RESOURCES.threads}), flush=True)


if __name__ == "__main__":
    main()
