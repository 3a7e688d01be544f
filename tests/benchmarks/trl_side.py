"""TRL's side of the comparison with peers: its trainers, configured to do nothing but train."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.laps import NO_TIME, Clock, Laps, Rows
from tests.benchmarks.peer_rows import BATCH, LEAST_FULL, LONGEST


def _each_lap(laps: Laps, steps: int) -> Any:
    """A callback that ends a lap after this many optimiser steps."""
    from transformers import TrainerCallback

    class EachLap(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step % steps == 0:
                laps.over()

    return EachLap()


def arguments_of(micro_batch: int, batch: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """Common arguments of TRL's trainers: weights in fp32, and nothing but training."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
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


def load(model: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    return weights, AutoTokenizer.from_pretrained(model)


def trl_sft(laps: Laps, model: Path, rows: Rows, settings: Mapping[str, Any]) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    more = dict(settings)
    arguments = arguments_of(
        more.pop("micro_batch"),
        more.pop("batch", BATCH),
        {"max_length": LONGEST, "completion_only_loss": True, **more},
    )
    weights, tokenizer = load(model)
    data = Dataset.from_list([{"input_ids": row["input_ids"], "completion_mask": row["loss_mask"]} for row in rows])
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
    arguments = arguments_of(settings["micro_batch"], BATCH, {"max_length": LONGEST})
    precompute = settings.get("precompute", False)

    class Timed(DPOTrainer):  # type: ignore[misc]
        """Tokens are given; the passes of the reference are timed."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _precompute_ref_logps(self, *given: Any, **options: Any) -> Any:
            return laps.timed("reference", super()._precompute_ref_logps)(*given, **options)

    weights, tokenizer = load(model)
    reference = None if precompute else load(model)[0]
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
    """Its ``training`` is the time outside sampling and rewards."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    completions, length = settings["completions"], settings["length"]

    def distinct(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert sum(map(len, completion_ids)) >= LEAST_FULL * length * len(completion_ids)
        return [float(len(set(completion))) for completion in completions]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, *given: Any) -> Any:
            return laps.timed("sampling", super()._prepare_inputs)(*given)

    more = {
        "num_generations": completions,
        "max_completion_length": length,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "loss_type": "dapo",
    }
    weights, tokenizer = load(model)
    config = GRPOConfig(**arguments_of(settings["micro_batch"], len(rows) * completions, more))
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    trainer = Timed(weights, distinct, config, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(_each_lap(laps, 1))
    over = laps.over

    def with_training() -> None:
        laps.parts["training"] = laps.started.passed() - laps.parts["sampling"]
        over()

    laps.over = with_training  # type: ignore[method-assign]
    trainer.train()
