"""Stage: scored rollouts → demonstrations, the best completions; the others are counted by reason."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.images import with_image_column
from alignment_core.data.turn_end import pass_chat_template_on
from alignment_core.errors import DataError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.recipes.sections.rejection_sampling import BestConfig
from alignment_core.rollout.best import lowest_kept, select_best
from alignment_core.rollout.images import copy_images, digests_of, have_images, images_of
from alignment_core.rollout.origins import write_origins_of_best
from alignment_core.rollout.schemas import read_rollouts, read_scores, write_table

Key = tuple[bytes, bytes, tuple[str, ...]]
"""Tokens of a prompt and of its completion, and the digests of the prompt's images."""


class SelectBestConfig(StageConfig):
    """What to keep. Inputs are the ``rollouts``, their ``scores``, and the data set ``earlier`` if rows are added to it."""

    selection: BestConfig
    may_be_empty: bool = False
    """Whether a round may keep no row, because the method then does not train on it."""


def run(context: StageContext, config: SelectBestConfig) -> dict[str, Any]:
    from alignment_core.data.kinds.texts import KIND  # demonstrations have the same columns
    from alignment_core.data.tables import schema

    selection = config.selection
    rollouts = read_rollouts(context.inputs["rollouts"])
    scores = read_scores(context.inputs["scores"])
    judged = [(row, score[selection.score]) for row, score in zip(rollouts, scores, strict=True)]
    values = [value for _, value in judged if value is not None]
    if not values:
        raise DataError(f"these scores have no {selection.score!r}; selection.score needs it")
    lowest = lowest_kept(values, selection)
    earlier = _earlier(context.inputs.get("earlier"))
    seen = {_key_of_row(row) for row in earlier}
    kept: list[tuple[dict[str, Any], float]] = []
    dropped: Counter[str] = Counter()
    for _, group in itertools.groupby(judged, key=lambda both: both[0]["prompt"]):
        candidates, unfit = _candidates([*group], selection)
        best, others = select_best(
            [score for _, score in candidates], [_key(row) for row, _ in candidates], lowest, selection.most_per_prompt
        )
        new = [candidates[number] for number in best if _key(candidates[number][0]) not in seen]
        dropped += unfit + others + Counter(duplicate=len(best) - len(new))
        seen |= {_key(row) for row, _ in new}
        kept += new
    if not kept and not config.may_be_empty:
        raise DataError(_nothing_kept(selection, len(judged), dropped, lowest, max(values)))
    rows = [*earlier, *(_demonstration(row) for row, _ in kept)] if kept else []
    pass_chat_template_on(context.inputs["rollouts"], context.output)
    if "earlier" in context.inputs:
        copy_images(earlier, context.inputs["earlier"], context.output)
    copy_images([row for row, _ in kept], context.inputs["rollouts"], context.output)
    columns = with_image_column(KIND.columns, have_images(rows))
    write_table(rows, schema(columns), context.output / "train.parquet")
    if kept:
        write_origins_of_best(kept, context.outputs["origins"])
    metrics = {
        "prompts": len({row["prompt"] for row in rollouts}),
        "completions": len(judged),
        "rows": len(rows),
        "new": len(kept),
        "kept": len(kept) / len(judged),
        "prompts_kept": len({row["prompt"] for row, _ in kept}),
        "score": float(np.mean(values)),
        **({"score_kept": float(np.mean([score for _, score in kept]))} if kept else {}),
        **{f"dropped_{reason}": count for reason, count in sorted(dropped.items())},
    }
    (context.output / "statistics.json").write_text(
        json.dumps({"train_rows": len(rows), "selection": metrics}, indent=2, sort_keys=True) + "\n"
    )
    return metrics


def _candidates(
    group: list[tuple[dict[str, Any], float | None]], selection: BestConfig
) -> tuple[list[tuple[dict[str, Any], float]], Counter[str]]:
    """The completions of a prompt that can be kept, and the number of the others by reason."""
    fit: list[tuple[dict[str, Any], float]] = []
    unfit: Counter[str] = Counter()
    for row, score in group:
        if score is None:
            unfit["failed_reward"] += 1
        elif row["finish_reason"] == "length" and selection.truncated == "drop":
            unfit["truncated"] += 1
        elif not len(row["completion_ids"]):
            unfit["empty"] += 1
        else:
            fit.append((row, score))
    return fit, unfit


def _earlier(folder: Path | None) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(folder / "train.parquet").to_pylist() if folder else []
    return rows


def _key(row: dict[str, Any]) -> Key:
    prompt, completion = (np.asarray(row[name], np.int32).tobytes() for name in ("prompt_ids", "completion_ids"))
    return prompt, completion, images_of(row)


def _key_of_row(row: dict[str, Any]) -> Key:
    ids, mask = np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], bool)
    return ids[~mask].tobytes(), ids[mask].tobytes(), images_of(row)


def _demonstration(row: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    return {
        "input_ids": np.concatenate([prompt, completion]),
        "loss_mask": np.repeat(np.array([0, 1], np.int8), [len(prompt), len(completion)]),
        "text": row["prompt_text"] + row["completion_text"],
        "source": row["source"],
        IMAGES: digests_of(row),
    }


def _nothing_kept(selection: BestConfig, completions: int, dropped: Counter[str], lowest: float, highest: float) -> str:
    bounds = [name for name in ("threshold", "quantile", "min_score") if getattr(selection, name) is not None]
    lower = " or ".join(f"selection.{name}" for name in bounds)
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()) if count)
    cure = {
        "low_score": f"lower {lower} (the minimum was {lowest:.4g}, the best score {highest:.4g})",
        "truncated": "raise generation.max_completion_length, or set selection.truncated: keep",
        "failed_reward": "look at the rewards, which gave no score",
        "duplicate": "raise generation.temperature; all good completions are in the rows of earlier rounds",
    }
    most = max(cure, key=lambda reason: dropped[reason])
    return f"none of the round's {completions} completions is left to train on ({counts}): {cure[most]}"


SHOWS = {"new": "kept", "kept": "share kept", "score": "score", "score_kept": "score of kept"}
STAGE = Stage(
    "select_best", 1, {"dataset": "dataset", "origins": "origins"}, SelectBestConfig, run, SHOWS, packages=("numpy",)
)
