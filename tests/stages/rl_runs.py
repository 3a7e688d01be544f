"""Runs of the rl stage on a tiny model: their smallest recipe, prompts, and the results of each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.models.scratch import create_model
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig, RlConfig, ScratchModel
from alignment_core.stages.rl import RlStageConfig
from tests.stages.killing import store_with

Section = dict[str, Any]
"""The section ``rl`` of a recipe."""
PROMPTS, GENERATIONS = 3, 4
"""Of each step, and of each prompt."""
RESOURCES = ResourcesConfig(
    device="cpu",
    trainers=2,
    engines=1,
    kv_cache_mib=16,
    zero_stage=1,
    wait_timeout_seconds=120,
    progress_seconds=1e-3,
)
"""A checkpoint after every step."""

SMALL_LETTERS = """
def share_of_small_letters(prompt, completion, label):
    return sum(letter.islower() for letter in completion) / max(1, len(completion))
"""


def two_head_model(folder: Path) -> Path:
    """A tiny model whose query and key heads two ranks can share, in this folder."""
    shape = ScratchModel(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    create_model(shape, None, 1, folder)
    return folder


def rewards_small_letters(folder: Path) -> dict[str, Any]:
    """A reward that a tiny model soon learns: the share of small letters in a completion. Its function is in ``folder``."""
    (folder / "reward.py").write_text(SMALL_LETTERS)
    return {"verifier": f"{folder / 'reward.py'}:share_of_small_letters"}


def section_of(
    steps: int,
    reward: dict[str, Any],
    generation: Mapping[str, Any] = MappingProxyType({}),
    training: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Section:
    """The section of so many steps, of one optimiser step each."""
    return {
        "prompts": {"task": "reverse", "rows": 8},
        "steps": steps,
        "prompts_per_step": PROMPTS,
        "generation": {"num_generations": GENERATIONS, **generation},
        "rewards": [reward],
        "training": {"batch_size": PROMPTS * GENERATIONS, **training},
        **more,
    }


def prompts() -> pa.Table:
    tokenizer = byte_tokenizer()
    texts = [f"<user>{number}+{number}=<assistant>" for number in range(8)]
    return pa.table(
        {
            "prompt_ids": [tokenizer(text)["input_ids"] for text in texts],
            "prompt": texts,
            "label": pa.nulls(8, pa.string()),
            "task": pa.nulls(8, pa.string()),
            "source": [f"rows.jsonl:{number}" for number in range(8)],
        }
    )


def demonstrations() -> pa.Table:
    texts = [byte_tokenizer()(f"{number}+{number}={2 * number}")["input_ids"] for number in range(8)]
    return pa.table({"input_ids": texts, "loss_mask": [[1] * len(ids) for ids in texts]})


def run_rl(
    folder: Path,
    model: Path,
    section: Section,
    machines: Any,
    resources: ResourcesConfig,
    reporter: Any = None,
    judges: Mapping[str, Path] = MappingProxyType({}),
    rows: pa.Table | None = None,
    chat_template: str | None = None,
    warm: Any = None,
) -> tuple[dict[str, Path], StageResult]:
    """The stage's output folders by name, and its result.

    ``rows`` are prompts other than :func:`prompts`, ``chat_template`` is their own; ``warm`` are machines other than those with
    two trainers.
    """
    store, policy, data = store_with(folder, model, prompts() if rows is None else rows, chat_template)
    config = RlStageConfig(section=RlConfig.model_validate(section)).model_dump(mode="json")
    inputs = {"policy": policy, "prompts": data}
    inputs |= {role: store.publish(folder, "reward-model") for role, folder in judges.items()}
    if "pretraining" in section:
        (folder / "pretraining").mkdir()
        pq.write_table(demonstrations(), folder / "pretraining" / "train.parquet")
        inputs["pretraining"] = store.publish(folder / "pretraining", "dataset")
    if "best" in section:
        inputs["held_out"] = data
    call = StageCall(stage="rl", label="rl", config=config, inputs=inputs)
    result = run_stage(StageRequest(store, call, warm or machines(2), resources, reporter or (lambda *_: None)))
    return {name: store.fetch(output) for name, output in result.outputs.items()}, result


def steps_of(outputs: Mapping[str, Path]) -> list[list[dict[str, Any]]]:
    """The trajectories of each step."""
    return [pq.read_table(file).to_pylist() for file in sorted(outputs["trajectories"].iterdir())]


def rows_of(outputs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The trajectories of all steps."""
    return [row for rows in steps_of(outputs) for row in rows]
