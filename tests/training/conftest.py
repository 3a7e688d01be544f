"""Training data of known shape, and one call that trains a job on real ranks and exports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from torch import Tensor

from alignment_core.artifacts import Reference
from alignment_core.models.model_ref import Model
from alignment_core.recipes import TrainingConfig
from alignment_core.training.trainer import TrainJob

Tables = dict[str, pa.Table]
MakeJob = Callable[..., TrainJob]
MODEL = Reference("model", "0" * 64)
"""Which artifact a model is matters to no trainer."""


def portable(folder: Path) -> dict[str, Tensor]:
    """All tensors of a portable checkpoint, which ranks write side by side."""
    files = sorted(folder.glob("portable-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def random_ids(random: np.random.Generator, shortest: int, longest: int) -> list[int]:
    return random.integers(0, 256, random.integers(shortest, longest)).tolist()


@pytest.fixture(scope="session")
def tables() -> Tables:
    """14 rows of demonstrations and of preference pairs, 4 to 60 tokens long: with batches of 6 an epoch ends unevenly.

    Those ``alike`` have one of three prompts of 24 tokens, and their answers share a few first tokens.
    """
    random = np.random.default_rng(5)
    ids = [random_ids(random, 4, 60) for _ in range(14)]
    masks = [[0] * (len(row) // 3) + [1] * (len(row) - len(row) // 3) for row in ids]
    pairs = {
        name: [random_ids(random, 2, 30) for _ in range(14)] for name in ("prompt_ids", "chosen_ids", "rejected_ids")
    }
    margins = random.uniform(0, 1, 14).astype(np.float32)
    prompts = [random_ids(random, 24, 25) for _ in range(3)]
    by_row = [prompts[number % 3] for number in range(14)]
    answers = [[7] * (number % 4) + random_ids(random, 2, 12) for number in range(28)]
    demonstrations = [prompt + answer for prompt, answer in zip(by_row, answers[:14], strict=True)]
    alike = {"prompt_ids": by_row, "chosen_ids": answers[:14], "rejected_ids": answers[14:], "margin": margins}
    return {
        "sft, alike": pa.table(
            {
                "input_ids": demonstrations,
                "loss_mask": [[0] * 20 + [1] * (len(row) - 20) for row in demonstrations],
            }
        ),
        "preference, alike": pa.table(alike),
        "sft": pa.table({"input_ids": ids, "loss_mask": masks}),
        "preference": pa.table({**pairs, "margin": margins}),
    }


@pytest.fixture(scope="session")
def mixture_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a mixture of four experts, of which each token takes two."""
    import torch
    import transformers

    from alignment_core.models.saving import save_checkpoint
    from alignment_core.models.tokenizer import byte_tokenizer

    def make(architecture: str) -> Path:
        tokenizer = byte_tokenizer()
        config = transformers.AutoConfig.for_model(
            architecture,
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=256,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.3,  # routers that prefer some experts
        )
        folder = tmp_path_factory.mktemp("mixture") / architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        save_checkpoint(model, None, folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def reference_logps(file: Path, pairs: pa.Table, **numbers: Sequence[int]) -> Path:
    """Plausible reference log-probabilities of these pairs, about 5.5 nats a token; of all, or of ``numbers`` by split."""
    columns: dict[str, list[Any]] = {"split": [], "row": [], "chosen_logp": [], "rejected_logp": []}
    for split in ("train", "test"):
        for number in numbers.get(split, range(len(pairs))):
            columns["split"].append(split)
            columns["row"].append(number)
            for side in ("chosen", "rejected"):
                ids = pairs[f"{side}_ids"][number].as_py()
                columns[f"{side}_logp"].append(np.float32(-5.5 * len(ids) + ids[0] / 256))
    pq.write_table(pa.table(columns), file)
    return file


@pytest.fixture
def make_job(tables: Tables, tiny_model: Any, tmp_path: Path) -> MakeJob:
    """A job over 14 rows in batches of 6, so 3 steps per epoch and 6 in all."""

    def make(method: Any, table: pa.Table | None = None, logps: Path | None = None, **training: Any) -> TrainJob:
        if table is None:
            table = tables["preference" if method.__class__.__name__ != "Sft" else "sft"]
        data = tmp_path / "train.parquet"
        pq.write_table(table, data)
        if method.needs_reference and logps is None:
            logps = reference_logps(tmp_path / "logps.parquet", table)
        # Adam divides a gradient by its own size: with the usual ε of 1e-8 the rounding of a gradient that is zero in
        # exact arithmetic would become a step by itself.
        settings = {"batch_size": 6, "num_train_epochs": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-5, **training}
        return TrainJob(
            method=method,
            model=Model(tiny_model(), MODEL),
            reference_logps=logps if method.needs_reference else None,
            train_data=data,
            test_data=data,
            training=TrainingConfig(**settings),
            seed=3,
        )

    return make
