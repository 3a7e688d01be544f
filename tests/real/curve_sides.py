"""The two sides of ``trl_curves``: a recipe's stages, and TRL's trainer on the rows that they made.

TRL 1.16 differs in the following, which is configured or overridden here so that both sides compute the same:

- The rows are the token ids of our data stage. TRL's own also have the newline that ChatML writes behind the end of a turn.
- KTO: TRL pairs the prompt of a row with the completion of the row before it in the micro-batch, ours with one that has another
  prompt in the whole data set (``alignment_core.training.kto_mismatch``). TRL gets our pairs, and the batch as one micro-batch,
  because its baseline is the mean of a micro-batch.
- ORPO: TRL's likelihood of the chosen answer includes the prompt, and is a mean over the tokens of a micro-batch. Equation 6 of
  Hong et al. 2024 has that of the answer, as a mean over pairs.
- Reward model: a public score head reads the last token that is no padding. Padding = EOS would make it the one before EOS, so
  TRL pads with another token.
- Schedules: TRL's warm-up begins with a step of rate 0, ours with rate / (steps + 1); there is no warm-up here. TRL decays
  embeddings, ours does not; there is no weight decay here.
- Held-out pairs with equal rewards, as all of DPO have before the first step: TRL counts them as wrong, ours as half right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.laps import Rows
from tests.benchmarks.trl_side import arguments_of, load

BATCH, MICRO_BATCH = 4, 2
"""Rows, or pairs, of a step, and of TRL's micro-batches."""
IN_TRL = {
    "loss": ("eval_loss",),
    "accuracy": ("eval_accuracy", "eval_rewards/accuracies"),
    "margin": ("eval_margin", "eval_rewards/margins"),
}
"""TRL's names of the metrics of held-out rows."""


@dataclass(frozen=True)
class Method:
    """A method to compare, and its settings."""

    recipe: str
    """The recipe's method."""
    rows: str
    """``gsm8k`` or ``hh-rlhf-harmless``."""
    learning_rate: float
    metrics: tuple[str, ...] = ("loss", "accuracy", "margin")
    """Of held-out rows; those that both sides have."""
    section: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the recipe's section."""

    @property
    def name(self) -> str:
        """Of the section and of the stage's data."""
        return self.recipe.replace("-", "_")


METHODS = {
    "sft": Method("sft", "gsm8k", 5e-5, ("loss",)),
    "dpo": Method("dpo", "hh-rlhf-harmless", 1e-5),
    "kto": Method("kto", "hh-rlhf-harmless", 1e-5, ("loss", "margin")),
    "orpo": Method("dpo", "hh-rlhf-harmless", 2e-5, section={"loss": {"loss_type": "orpo"}}),
    "reward-model": Method("reward-model", "hh-rlhf-harmless", 2e-5),
}


@dataclass(frozen=True)
class Sizes:
    """How much is trained and measured."""

    steps: int = 8
    max_length: int = 160
    """Tokens; longer rows are left out."""
    held_out: int = 64
    """The shortest rows of the test set, of which those that are too long are left out."""


@dataclass(frozen=True)
class Side:
    """Results of a side."""

    losses: list[float]
    """Of each step."""
    held_out: dict[str, list[float]]
    """The method's metrics of held-out rows, before and after."""
    seconds: float
    """Of the optimiser steps."""
    rows: str = ""
    """Folder of the rows; only of ours."""


def ours(name: str, model: Path, folder: Path, data: Path, sizes: Sizes, machines: Any = None) -> Side:
    """The recipe's stages in this process, with the rows in their order; ``machines`` default to new ones."""
    from alignment_core.artifacts import open_store
    from alignment_core.composition.graph import composing
    from alignment_core.execution.machines import WarmMachines
    from alignment_core.recipes import ResourcesConfig
    from alignment_core.recipes.methods import method
    from tests.composed import Runs

    steps: dict[float, dict[str, float]] = {}

    def report(done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None:
        if unit == "steps":
            steps.setdefault(done, {}).update(metrics)

    settings = METHODS[name]
    folder.mkdir(parents=True, exist_ok=True)
    lines = (data / settings.rows / "test.jsonl").read_text().strip("\n").split("\n")
    held_out = folder / "held-out.jsonl"
    held_out.write_text("".join(f"{line}\n" for line in sorted(lines, key=len)[: sizes.held_out]))
    definition = method(settings.recipe)
    recipe = definition.recipe.model_validate(_recipe(settings, model, data, held_out, sizes))
    own = machines or WarmMachines(ResourcesConfig(device="cpu", trainers=1, wait_timeout_seconds=600), folder)
    try:
        run = Runs(open_store(folder / "store"), own, report)
        with composing(run):
            definition.compose(recipe)
    finally:
        if machines is None:
            own.close()
    result = run.results[settings.recipe]
    measured = result.metrics
    return Side(
        losses=[steps[step]["loss"] for step in range(1, sizes.steps + 1)],
        held_out={
            metric: [measured[f"test_{metric}.first"], measured[f"test_{metric}"]] for metric in settings.metrics
        },
        seconds=result.cost["train_seconds"],
        rows=str(run.store.fetch(run.results[f"{settings.recipe}/data"].reference)),
    )


def _recipe(settings: Method, model: Path, data: Path, held_out: Path, sizes: Sizes) -> dict[str, Any]:
    is_gsm8k = settings.rows == "gsm8k"
    columns = {"columns": {"prompt": "question", "completion": "answer"}} if is_gsm8k else {}
    source = {"path": str(data / settings.rows / "train.jsonl"), **columns}
    rows = {
        "sources": [source, {**source, "path": str(held_out), "held_out": True}],
        "max_length": sizes.max_length,
        "max_bad_rows": 0.05,
        "shuffle": False,
    }
    training = {
        "batch_size": BATCH,
        "max_steps": sizes.steps,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.0,
    }
    section = {"data": rows, "training": training, **settings.section}
    return {"method": settings.recipe, "name": "curves", "model": str(model), settings.name: section}


def of_trl(name: str, model: Path, rows: Path, sizes: Sizes) -> Side:
    """TRL's trainer with the rows of ``rows`` in their order, measured before and after."""
    from datasets import Dataset, disable_caching

    disable_caching()
    splits = _rows(name, rows, sizes)
    whole = name in ("sft", "kto")  # their held-out loss is a mean over tokens, or has a baseline of the whole batch
    arguments = arguments_of(
        BATCH if name == "kto" else MICRO_BATCH,
        BATCH,
        {
            "max_steps": sizes.steps,
            "learning_rate": METHODS[name].learning_rate,
            "lr_scheduler_type": "linear",
            "train_sampling_strategy": "sequential",
            "max_length": sizes.max_length,
            "per_device_eval_batch_size": len(splits["test"]) if whole else 1,
        },
    )
    datasets = {split: Dataset.from_list(of_split) for split, of_split in splits.items()}
    trainer = TRAINERS[name](model, arguments, datasets)
    before = trainer.evaluate()
    started = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - started
    after = trainer.evaluate()
    parts = arguments["gradient_accumulation_steps"]
    return Side(
        losses=[sum(trainer.losses[first : first + parts]) for first in range(0, len(trainer.losses), parts)],
        held_out={
            metric: [measured[key] for measured in (before, after)]
            for metric in METHODS[name].metrics
            for key in IN_TRL[metric]
            if key in before
        },
        seconds=seconds,
    )


def _rows(name: str, folder: Path, sizes: Sizes) -> dict[str, Rows]:
    """Our rows in the columns of TRL's trainer: those of the steps, and all held-out ones."""
    import pyarrow.parquet as pq

    from alignment_core.training.kto_mismatch import mismatched

    splits = {}
    for split in ("train", "test"):
        rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
        if name == "kto":
            others = mismatched([row["prompt_ids"] for row in rows], [row["completion_ids"] for row in rows], split)
            rows = [{**row, "KL_completion_ids": list(other)} for row, other in zip(rows, others, strict=True)]
        if split == "train":
            rows = rows[: sizes.steps * BATCH]
        splits[split] = [_columns(name, row) for row in rows]
    return splits


def _columns(name: str, row: dict[str, Any]) -> dict[str, Any]:
    if name == "sft":
        return {"input_ids": row["input_ids"], "completion_mask": [int(target) for target in row["loss_mask"]]}
    if name in ("dpo", "kto"):
        columns = ("prompt_ids", "chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids", "label")
        return {column: row[column] for column in columns if column in row}
    sides = {side: row["prompt_ids"] + row[f"{side}_ids"] for side in ("chosen", "rejected")}
    if name == "reward-model":
        return {f"{side}_ids": ids for side, ids in sides.items()}
    masked = [-100] * len(row["prompt_ids"])
    columns_of_orpo: dict[str, Any] = {}
    for side, ids in sides.items():
        columns_of_orpo |= {
            f"{side}_input_ids": ids,
            f"{side}_attention_mask": [1] * len(ids),
            f"{side}_labels": masked + row[f"{side}_ids"],
        }
    return columns_of_orpo


def recording(kind: Any, tokenizes: bool) -> Any:
    """A trainer that keeps the loss of each micro-batch, whose sum is that of the step; one that ``tokenizes`` whatever it gets
    takes its rows as they are."""

    class Recording(kind):  # type: ignore[misc]
        def __init__(self, *given: Any, **options: Any) -> None:
            self.losses: list[float] = []
            super().__init__(*given, **options)

        def _prepare_dataset(self, dataset: Any, *given: Any, **options: Any) -> Any:
            return dataset if tokenizes else super()._prepare_dataset(dataset, *given, **options)

        def training_step(self, *given: Any, **options: Any) -> Any:
            loss = super().training_step(*given, **options)
            self.losses.append(float(loss))
            return loss

    return Recording


def _sft(model: Path, arguments: dict[str, Any], datasets: Mapping[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**arguments, completion_only_loss=True)
    return _trainer(SFTTrainer, load(model), config, datasets)


def _dpo(model: Path, arguments: dict[str, Any], datasets: Mapping[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    return _trainer(DPOTrainer, load(model), DPOConfig(**arguments, precompute_ref_log_probs=True), datasets)


def _kto(model: Path, arguments: dict[str, Any], datasets: Mapping[str, Any]) -> Any:
    from trl import KTOConfig, KTOTrainer

    return _trainer(KTOTrainer, load(model), KTOConfig(**arguments, precompute_ref_log_probs=True), datasets)


def _orpo(model: Path, arguments: dict[str, Any], datasets: Mapping[str, Any]) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class OfThePaper(ORPOTrainer):  # type: ignore[misc]
        def tokenize_row(self, feature: dict[str, Any], model: Any = None) -> dict[str, Any]:
            return feature

        def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
            """The chosen answers' mean log-probabilities come first, their likelihood's loss fifth."""
            output = super().concatenated_forward(model, batch)
            return (*output[:4], -output[0].mean(), *output[5:])

    return _trainer(OfThePaper, load(model), ORPOConfig(**arguments), datasets)


def _reward_model(model: Path, arguments: dict[str, Any], datasets: Mapping[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = next(token for token in tokenizer.all_special_tokens if token != tokenizer.eos_token)
    weights = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    return _trainer(RewardTrainer, (weights, tokenizer), RewardConfig(**arguments), datasets)


def _trainer(kind: Any, loaded: tuple[Any, Any], config: Any, datasets: Mapping[str, Any]) -> Any:
    weights, tokenizer = loaded
    tokenizes = kind.__name__ in ("DPOTrainer", "KTOTrainer")
    return recording(kind, tokenizes)(
        weights,
        args=config,
        train_dataset=datasets["train"],
        eval_dataset=datasets["test"],
        processing_class=tokenizer,
    )


TRAINERS = {"sft": _sft, "dpo": _dpo, "kto": _kto, "orpo": _orpo, "reward-model": _reward_model}


def scored(model: Path, folder: Path) -> Path:
    """The model with a new score head, from which both sides start a reward model."""
    import torch
    from transformers import AutoTokenizer

    from alignment_core.models.loading import load_model

    load_model(str(model), "score", torch.float32, head_seed=0).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
