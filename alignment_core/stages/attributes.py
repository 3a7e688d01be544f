"""Stage: completions and their rewards → rows with attributes, which are written into prompts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from alignment_core.data.messages import as_given, tools_of
from alignment_core.data.rows_file import ROWS
from alignment_core.errors import DataError
from alignment_core.execution.base import Stage, StageConfig, StageContext
from alignment_core.recipes.sections.conditional_sft import AttributeConfig
from alignment_core.rollout.images import copy_images
from alignment_core.rollout.schemas import read_rollouts, read_scores


class AttributesConfig(StageConfig):
    """The attributes, in the order of their rewards in the input ``scores``; ``rollouts`` are the completions."""

    attributes: dict[str, AttributeConfig]

    def content(self) -> Any:
        written = {
            name: {"bins": attribute.bins, "decimals": attribute.decimals}
            for name, attribute in self.attributes.items()
        }
        # Each has the reward at its place, and a key forgets the order of names.
        return {"attributes": written if len(written) == 1 else [*written.items()]}


def run(context: StageContext, config: AttributesConfig) -> dict[str, Any]:
    rollouts = read_rollouts(context.inputs["rollouts"])
    scores = read_scores(context.inputs["scores"])
    templated = any(row.get("messages") for row in rollouts)
    rows: list[tuple[dict[str, Any], list[float]]] = []
    dropped: Counter[str] = Counter()
    for row, score in zip(rollouts, scores, strict=True):
        values = score["rewards"]
        if any(value is None for value in values):
            dropped["failed_reward"] += 1
        elif row["finish_reason"] == "length":
            dropped["truncated"] += 1
        elif templated and not row.get("messages"):
            dropped["prompt_was_cut"] += 1
        else:
            rows.append((row, values))
    if not rows:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        raise DataError(f"none of {len(rollouts)} completions is left to train on: {counts}")
    columns = [np.array([values[number] for _, values in rows]) for number in range(len(config.attributes))]
    metrics: dict[str, Any] = {"completions": len(rollouts), "rows": len(rows)}
    metrics |= {f"dropped_{reason}": count for reason, count in sorted(dropped.items())}
    written: dict[str, list[str]] = {}
    edges: dict[str, list[float]] = {}
    for (name, attribute), values_B in zip(config.attributes.items(), columns, strict=True):
        metrics[f"{name}.mean"] = float(values_B.mean())
        metrics[f"{name}.deviation"] = float(values_B.std())
        numbers_B = values_B
        if attribute.bins:
            edges[name] = inner_edges(values_B, attribute.bins)
            numbers_B = np.searchsorted(edges[name], values_B, side="right")
        written[name] = [attribute.written(number) for number in numbers_B]
        if len(set(written[name])) == 1:
            metrics.setdefault("warnings", []).append(
                f"all completions have {name}={written[name][0]}: the policy cannot learn what it means"
            )
        elif attribute.bins and (highest := int(numbers_B.max())) < attribute.bins - 1:
            metrics.setdefault("warnings", []).append(
                f"equal values of {name} share a bin, so that {name}={highest} is the highest of {attribute.bins}: the policy "
                "never sees a higher one"
            )
    with (context.output / ROWS).open("w", encoding="utf-8") as file:
        for number, (row, _) in enumerate(rows):
            given: dict[str, Any] = {
                "prompt": as_given(row) or row["prompt_text"],
                "completion": row["completion_text"],
                "completion_ids": row["completion_ids"].tolist(),
            }
            given |= {"tools": tools} if (tools := tools_of(row)) else {}
            labels = {name: texts[number] for name, texts in written.items()}
            file.write(json.dumps({**given, **labels}, ensure_ascii=False) + "\n")
    copy_images((row for row, _ in rows), context.inputs["rollouts"], context.output)
    (context.output / "statistics.json").write_text(
        json.dumps({"edges": edges, "metrics": metrics}, indent=2, sort_keys=True) + "\n"
    )
    return metrics


def inner_edges(values_B: np.ndarray, bins: int) -> list[float]:
    """The distinct quantiles between bins. A value belongs to the bin after all edges that are not above it.

    An edge at the minimum would leave an empty bin below it, so it moves to the next value.
    """
    edges = np.quantile(values_B, np.arange(1, bins) / bins)
    distinct = np.unique(values_B)
    above = distinct[min(1, len(distinct) - 1)]
    return [float(edge) for edge in np.unique(np.where(edges <= distinct[0], above, edges))]


SHOWS = {"rows": "rows"}
STAGE = Stage("attributes", 1, {"rows": "rows"}, AttributesConfig, run, SHOWS, packages=("numpy",))
