"""Pairs of a round: the real stage, on files made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from alignment_core.errors import DataError
from alignment_core.recipes import SelectionConfig
from alignment_core.rollout.origins import ORIGINS
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table
from alignment_core.stages import select_pairs

Sampled = dict[int, list[tuple[str, float | None, str]]]
"""Completions with their rewards and reasons of the end, by number of the prompt."""
Select = Callable[..., tuple[dict[str, Any], list[tuple[str, str]]]]


@pytest.fixture
def select(tmp_path: Path) -> Select:
    def run(sampled: Sampled, **fields: Any) -> Any:
        scores, rollouts = [], []
        for prompt, completions in sampled.items():
            for sample, (text, reward, reason) in enumerate(completions):
                shared = {"prompt": prompt, "sample": sample, "finish_reason": reason}
                scores.append({**shared, "tokens": len(text), "reward": reward, "policy_logp": -1.0})
                rollouts.append({**shared, "prompt_ids": [1], "completion_ids": [*text.encode()]})
                rollouts[-1] |= {"prompt_text": "p", "completion_text": text, "source": "rows:1"}
        folders = {name: tmp_path / name for name in ("scores", "rollouts", "output", "origins")}
        for folder in folders.values():
            folder.mkdir()
        write_table(scores, score_schema(), folders["scores"] / SCORES)
        write_table(rollouts, rollout_schema(), folders["rollouts"] / "shard-00000.parquet")
        context: Any = SimpleNamespace(inputs=folders, output=folders["output"], outputs=folders, derive=lambda *_: 0)
        metrics = select_pairs.run(context, select_pairs.SelectPairsConfig(selection=SelectionConfig(**fields)))
        rows = pq.read_table(folders["output"] / "train.parquet").to_pylist()
        return metrics, [(row["chosen"], row["rejected"]) for row in rows]

    return run


SAMPLED: Sampled = {
    0: [("cut, best", 0.9, "length"), ("good", 0.5, "stop"), ("bad", 0.1, "stop"), ("cut, worst", 0.0, "length")],
    1: [("cut", 0.9, "length"), ("whole", 0.5, "stop")],
    2: [("no score", None, "length"), ("cut", 0.5, "length")],
    3: [("a", 0.5, "stop"), ("b", 0.5, "stop")],
}


@pytest.mark.parametrize("strategy", ["best_worst", "best_random", "random_pair", "all_pairs"])
def test_truncated_completions_are_neither_chosen_nor_rejected(select: Select, strategy: str) -> None:
    metrics, pairs = select(SAMPLED, strategy=strategy)
    assert pairs == [("good", "bad")]
    assert metrics == {"pairs": 1, "truncated": 5 / 10, "dropped_truncated": 2, "dropped_tie": 1}


def test_truncated_completions_can_be_kept(select: Select) -> None:
    metrics, pairs = select(SAMPLED, truncated="keep")
    assert pairs == [("cut, best", "cut, worst"), ("cut", "whole")]
    assert metrics == {"pairs": 2, "truncated": 5 / 10, "dropped_identical": 1, "dropped_tie": 1}


def test_every_pair_keeps_which_samples_of_which_prompt_it_is_even_among_equal_texts(
    select: Select, tmp_path: Path
) -> None:
    same = [("same", 0.5, "stop"), ("same", 0.5, "stop"), ("bad", 0.25, "stop"), ("good", 0.75, "stop")]
    _, pairs = select(
        {3: same, 7: [("b", 0.0, "stop"), ("a", 1.0, "stop")]}, strategy="all_pairs", max_pairs_per_prompt=3
    )
    origins = pq.read_table(tmp_path / "origins" / ORIGINS).to_pylist()
    texts = {(3, number): text for number, (text, *_) in enumerate(same)} | {(7, 0): "b", (7, 1): "a"}
    assert [(texts[row["prompt"], row["chosen"]], texts[row["prompt"], row["rejected"]]) for row in origins] == pairs
    assert (3, 3, 2, 0.75, 0.25) in [tuple(row.values()) for row in origins]
    assert (7, 1, 0, 1.0, 0.0) in [tuple(row.values()) for row in origins]
    assert all(row["chosen_score"] > row["rejected_score"] for row in origins)


def test_a_round_of_truncated_completions_is_refused_with_its_cure(select: Select) -> None:
    cut: Sampled = {number: [("a", 0.1, "length"), ("b", 0.2, "length"), ("c", 0.3, "stop")] for number in range(3)}
    sentence = (
        r"no prompt gave a pair \(3 truncated\): .*raise generation\.max_completion_length, or set "
        r"selection\.truncated: keep"
    )
    with pytest.raises(DataError, match=sentence):
        select(cut)


def test_a_round_of_equal_scores_is_refused_with_its_cure(select: Select) -> None:
    with pytest.raises(DataError, match=r"\(1 tie\): the scores .* lower selection\.min_margin"):
        select({3: SAMPLED[3]})
