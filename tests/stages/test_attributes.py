"""Completions with attributes from rewards: values and bins, dropped rows, and warnings about constant values."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from alignment_core.canonical import digest_of
from alignment_core.errors import DataError
from alignment_core.recipes.sections.conditional_sft import AttributeConfig
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table
from alignment_core.stages import attributes
from alignment_core.stages.attributes import AttributesConfig, inner_edges

REWARD = {"reward": {"verifier": "task"}}


def ran(folder: Path, values: list[list[float | None]], configs: dict[str, Any], **rows: Any) -> tuple[Any, list[Any]]:
    rollouts, scores, output = (folder / name for name in ("rollouts", "scores", "output"))
    for each in (rollouts, scores, output):
        each.mkdir()
    sampled = [
        {
            "prompt": number,
            "sample": 0,
            "prompt_ids": [1],
            "completion_ids": [2],
            "logps": [0.0],
            "finish_reason": "stop",
            "prompt_text": f"p{number}",
            "completion_text": f"c{number}",
            "source": "s",
            "policy": "m",
            **{name: column[number] for name, column in rows.items()},
        }
        for number in range(len(values))
    ]
    blank = dict.fromkeys(rollout_schema().names)
    write_table([{**blank, **row} for row in sampled], rollout_schema(), rollouts / "shard-00000.parquet")
    empty = dict.fromkeys(score_schema().names)
    judged = [
        {**empty, "prompt": number, "sample": 0, "tokens": 1, "finish_reason": "stop", "rewards": given}
        for number, given in enumerate(values)
    ]
    write_table(judged, score_schema(), scores / SCORES)
    config = AttributesConfig(
        attributes={name: AttributeConfig.model_validate(fields) for name, fields in configs.items()}
    )
    context: Any = SimpleNamespace(inputs={"rollouts": rollouts, "scores": scores}, output=output)
    metrics = attributes.run(context, config)
    return metrics, [json.loads(line) for line in (output / attributes.ROWS).read_text().splitlines()]


def test_values_are_written_unchanged_or_as_numbers_of_quantiles(tmp_path: Path) -> None:
    values: list[list[float | None]] = [[0.125, float(number)] for number in range(8)]
    configs = {"good": {**REWARD, "decimals": 1}, "long": {**REWARD, "bins": 4}}
    metrics, rows = ran(tmp_path, values, configs)
    assert [row["good"] for row in rows] == ["0.1"] * 8
    assert [row["long"] for row in rows] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert rows[3] == {"prompt": "p3", "completion": "c3", "completion_ids": [2], "good": "0.1", "long": "1"}
    assert metrics["long.mean"] == 3.5
    assert metrics["warnings"] == ["all completions have good=0.1: the policy cannot learn what it means"]


def test_equal_values_share_a_bin() -> None:
    for values, edges in (
        ([0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0.75, 1.0]),
        ([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0]),
        ([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1.0]),
    ):
        assert inner_edges(np.array(values), 4) == edges
        bins = np.searchsorted(edges, values, side="right")
        assert len(set(bins)) == 2, "right and wrong are distinguished in any proportion"
    assert inner_edges(np.ones(3), 4) == [1.0]


def test_bins_that_stay_empty_are_named_as_a_wanted_value_may_be_one_of_them(tmp_path: Path) -> None:
    """Right or wrong by quartiles, which are 0, 1 and 1: only the numbers 0 and 1 are left."""
    metrics, rows = ran(tmp_path, [[0.0], [1.0], [0.0], [1.0], [1.0]], {"good": {**REWARD, "bins": 4}})
    assert [row["good"] for row in rows] == ["0", "1", "0", "1", "1"]
    (warning,) = metrics["warnings"]
    assert "good=1 is the highest of 4: the policy never sees a higher one" in warning


def test_samples_that_are_no_examples_are_left_out_and_counted(tmp_path: Path) -> None:
    metrics, rows = ran(
        tmp_path,
        [[1.0], [None], [0.0], [0.5]],
        {"good": REWARD},
        finish_reason=["stop", "stop", "length", "stop"],
        messages=[json.dumps([{"role": "user", "content": "u"}]), None, None, None],
    )
    prompt = [{"role": "user", "content": "u"}]
    assert rows == [{"prompt": prompt, "completion": "c0", "completion_ids": [2], "good": "1.00"}]
    dropped = {name: value for name, value in metrics.items() if name.startswith("dropped_")}
    assert dropped == {"dropped_failed_reward": 1, "dropped_truncated": 1, "dropped_prompt_was_cut": 1}


def test_an_empty_result_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 2 completions is left to train on: 1 failed_reward, 1 truncated"):
        ran(tmp_path, [[None], [1.0]], {"good": REWARD}, finish_reason=["stop", "length"])


def test_attributes_that_swap_their_rewards_are_another_stage() -> None:
    """Its input scores are the same: rewards have no names."""
    first, second = (AttributeConfig.model_validate(REWARD) for _ in range(2))
    keys = [
        digest_of(AttributesConfig(attributes=attributes).content())
        for attributes in ({"helpful": first, "safe": second}, {"safe": first, "helpful": second})
    ]
    assert keys[0] != keys[1]
