"""Stage: scored rollouts → preference pairs; prompts without a pair are counted by reason."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

from alignment_core.data.images import COLUMN as IMAGES
from alignment_core.data.images import with_image_column
from alignment_core.data.turn_end import pass_chat_template_on
from alignment_core.errors import DataError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.recipes import SelectionConfig
from alignment_core.rollout.images import copy_images, digests_of, have_images
from alignment_core.rollout.origins import write_origins_of_pairs
from alignment_core.rollout.schemas import read_rollouts, read_scores, write_table
from alignment_core.rollout.selection import select_pairs


class SelectPairsConfig(StageConfig):
    """How to pair."""

    selection: SelectionConfig


def run(context: StageContext, config: SelectPairsConfig) -> dict[str, Any]:
    from alignment_core.data.kinds.preferences import KIND
    from alignment_core.data.tables import schema

    selection = config.selection
    rollouts = read_rollouts(context.inputs["rollouts"])
    scores = read_scores(context.inputs["scores"])
    if all(score[selection.score] is None for score in scores):
        raise DataError(f"these scores have no {selection.score!r}; selection.score needs it")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    scores_of_pairs: list[tuple[float, float]] = []
    dropped: Counter[str] = Counter()
    joined = list(zip(rollouts, scores, strict=True))
    truncated = [row["finish_reason"] == "length" for row in rollouts]
    for prompt, group in itertools.groupby(joined, key=lambda both: both[0]["prompt"]):
        scored = [(row, score[selection.score]) for row, score in group if score[selection.score] is not None]
        if not scored:
            dropped["failed_reward"] += 1
            continue
        if selection.truncated == "drop":
            whole = [(row, score) for row, score in scored if row["finish_reason"] != "length"]
            if len(whole) < min(2, len(scored)):
                dropped["truncated"] += 1
                continue
            scored = whole
        rows, values = zip(*scored, strict=True)
        tokens = [row["completion_ids"].tobytes() for row in rows]
        chosen_pairs, reason = select_pairs(values, tokens, selection, random.Random(context.derive("pair", prompt)))
        if reason:
            dropped[reason] += 1
        pairs += [(rows[chosen], rows[rejected]) for chosen, rejected in chosen_pairs]
        scores_of_pairs += [(values[chosen], values[rejected]) for chosen, rejected in chosen_pairs]
    if not pairs:
        raise DataError(_no_pairs(dropped))
    pass_chat_template_on(context.inputs["rollouts"], context.output)
    copy_images([chosen for chosen, _ in pairs], context.inputs["rollouts"], context.output)
    selected = [_pair(*pair) for pair in pairs]
    columns = with_image_column(KIND.columns, have_images(selected))
    write_table(selected, schema(columns), context.output / "train.parquet")
    write_origins_of_pairs(pairs, scores_of_pairs, context.outputs["origins"])
    statistics = {"train_rows": len(pairs), "prompts_without_pair": dict(sorted(dropped.items()))}
    (context.output / "statistics.json").write_text(json.dumps(statistics, indent=2, sort_keys=True) + "\n")
    return {
        "pairs": len(pairs),
        "truncated": sum(truncated) / len(truncated),
        **{f"dropped_{reason}": count for reason, count in sorted(dropped.items())},
    }


def _no_pairs(dropped: Counter[str]) -> str:
    """The error if there is no pair, with the cure for the most frequent reason."""
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    cures = {
        "truncated": "fewer than two of their completions are complete; raise generation.max_completion_length, or set "
        "selection.truncated: keep",
        "failed_reward": "look at the rewards, which gave no score",
    }
    cure = cures.get(
        max(dropped, key=lambda reason: dropped[reason]),
        "the scores of the completions do not differ enough; raise the temperature or num_generations, or lower "
        "selection.min_margin",
    )
    return f"no prompt gave a pair ({counts}): {cure}"


def _pair(chosen: dict[str, Any], rejected: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt_ids": chosen["prompt_ids"],
        "chosen_ids": chosen["completion_ids"],
        "rejected_ids": rejected["completion_ids"],
        "margin": None,
        "prompt": chosen["prompt_text"],
        "chosen": chosen["completion_text"],
        "rejected": rejected["completion_text"],
        "source": chosen["source"],
        IMAGES: digests_of(chosen),
    }


SHOWS = {"pairs": "pairs"}
STAGE = Stage("select_pairs", 1, {"dataset": "dataset", "origins": "origins"}, SelectPairsConfig, run, SHOWS)
