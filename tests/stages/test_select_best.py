"""Demonstrations of the best completions, and the gain of rounds: the real stages, on files made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from alignment_core.errors import DataError
from alignment_core.recipes.sections.rejection_sampling import BestConfig
from alignment_core.rollout.origins import ORIGINS
from alignment_core.rollout.schemas import SCORES, rollout_schema, score_schema, write_table
from alignment_core.stages import gain, select_best
from alignment_core.training.methods.sft import Sft

Sampled = dict[int, list[tuple[list[int], float | None]]]
"""Completions with their scores, by number of the prompt. Prompt n is the token 10 + n // 10."""
Select = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture
def select(tmp_path: Path) -> Select:
    def run(
        sampled: Sampled, earlier: Path | None = None, empty: bool = False, cut: bool = False, **fields: Any
    ) -> Any:
        folder = tmp_path / f"{len([*tmp_path.iterdir()])}"
        scores, rollouts = [], []
        for prompt, completions in sampled.items():
            for sample, (ids, score) in enumerate(completions):
                reason = {"finish_reason": "length" if cut else "stop"}
                shared = {"prompt": prompt, "sample": sample, **reason}
                scores.append({**shared, "tokens": len(ids), "reward": score, "policy_logp": -1.0})
                rollouts.append({**shared, "prompt_ids": [10 + prompt // 10], "completion_ids": ids})
                rollouts[-1] |= {"prompt_text": "p", "completion_text": f"{ids}", "source": f"rows:{prompt}"}
        folders = {name: folder / name for name in ("scores", "rollouts", "output", "origins")}
        for directory in folders.values():
            directory.mkdir(parents=True)
        write_table(scores, score_schema(), folders["scores"] / SCORES)
        write_table(rollouts, rollout_schema(), folders["rollouts"] / "shard-00000.parquet")
        context: Any = SimpleNamespace(
            inputs=folders | ({"earlier": earlier} if earlier else {}), output=folders["output"], outputs=folders
        )
        config = select_best.SelectBestConfig(selection=BestConfig(**fields), may_be_empty=empty)
        return select_best.run(context, config), folders["output"]

    return run


def tokens(folder: Path) -> list[list[int]]:
    return pq.read_table(folder / "train.parquet").column("input_ids").to_pylist()


def origins(folder: Path) -> list[tuple[Any, ...]]:
    rows = pq.read_table(folder.parent / "origins" / ORIGINS).to_pylist()
    return [(row["prompt"], row["sample"], pytest.approx(row["score"])) for row in rows]


SAMPLED: Sampled = {
    0: [([1, 2], 0.1), ([3], 0.9), ([3], 0.9), ([4], None)],
    10: [([5], 0.4), ([6, 7], 0.6), ([6, 7], 0.6), ([8], 0.2)],
    11: [([6, 7], 0.6), ([9], 0.5), ([9], 0.5), ([9], 0.5)],  # the prompt of number 10 once more
}


def test_the_best_of_each_prompt_becomes_a_demonstration_and_every_other_one_is_counted(select: Select) -> None:
    metrics, folder = select(SAMPLED)
    assert tokens(folder) == [[10, 3], [11, 6, 7]]
    # 12 completions: 2 kept; 1 without a score; equal to a better one 1 + 1 + 2 (two of the 9s), and the 6, 7 of prompt 11,
    # which prompt 10 has; not the best 1 + 2 + 1
    assert metrics == {
        "prompts": 3,
        "completions": 12,
        "rows": 2,
        "new": 2,
        "kept": pytest.approx(2 / 12),
        "prompts_kept": 2,
        "score": pytest.approx((0.1 + 0.9 + 0.9 + 0.4 + 0.6 + 0.6 + 0.2 + 0.6 + 1.5) / 11),
        "score_kept": pytest.approx(0.75),
        "dropped_duplicate": 5,
        "dropped_failed_reward": 1,
        "dropped_not_best": 4,
    }
    assert sum(count for name, count in metrics.items() if name.startswith("dropped")) + metrics["new"] == 12


def test_completions_are_trained_on_and_prompts_are_not(select: Select) -> None:
    _, folder = select(SAMPLED)
    rows = Sft().rows(pq.read_table(folder / "train.parquet"))
    assert [row.sequences[0].targets.tolist() for row in rows] == [[False, True], [False, True, True]]
    assert pq.read_table(folder / "train.parquet").column("source").to_pylist() == ["rows:0", "rows:10"]


def test_a_quantile_keeps_the_better_part_of_the_whole_round(select: Select) -> None:
    metrics, folder = select(SAMPLED, strategy="threshold", quantile=0.6)
    # 11 scores: 0.1, 0.2, 0.4, three times 0.5, three times 0.6, twice 0.9; 60 % of the way is the first 0.6
    assert tokens(folder) == [[10, 3], [11, 6, 7]]
    assert metrics["dropped_low_score"] == 6
    metrics, folder = select(SAMPLED, strategy="threshold", threshold=0.4)
    assert tokens(folder) == [[10, 3], [11, 6, 7], [11, 5], [11, 9]]


def test_rows_of_earlier_rounds_go_first_and_are_not_repeated(select: Select) -> None:
    _, earlier = select(SAMPLED)
    metrics, folder = select({0: [([3], 1.0), ([2], 0.5)], 20: [([3], 1.0)]}, earlier=earlier)
    assert tokens(folder) == [[10, 3], [11, 6, 7], [12, 3]]
    assert (metrics["rows"], metrics["new"], metrics["dropped_duplicate"]) == (3, 1, 1)
    assert origins(earlier) == [(0, 1, 0.9), (10, 1, 0.6)], "prompt, sample, score"
    assert origins(folder) == [(20, 0, 1.0)], "of the rows that the round added"


@pytest.mark.parametrize(
    ("sampled", "fields", "sentence"),
    [
        (
            SAMPLED,
            {"min_score": 2},
            r"none of the round's 12 completions is left .*\(1 failed_reward, 11 low_score\): lower selection\.min_score",
        ),
        (SAMPLED, {"min_score": 2}, r"the minimum was 2, the best score 0\.9"),
        (
            SAMPLED,
            {"cut": True},
            r"11 truncated\): raise generation\.max_completion_length, or set selection\.truncated",
        ),
        ({0: [([1], None)]}, {}, "these scores have no 'reward'"),
    ],
)
def test_a_round_without_kept_rows_has_a_reason_and_a_remedy(select: Select, sampled, fields, sentence) -> None:
    with pytest.raises(DataError, match=sentence):
        select(sampled, **fields)


def test_truncated_completions_are_kept_if_configured(select: Select) -> None:
    assert select(SAMPLED, cut=True, truncated="keep")[0]["new"] == 2


def test_a_round_may_keep_no_rows_if_the_method_allows_that(select: Select) -> None:
    _, earlier = select(SAMPLED)
    metrics, folder = select(SAMPLED, earlier=earlier, empty=True)
    assert (metrics["new"], metrics["kept"], tokens(folder)) == (0, 0.0, [])


# ---------------------------------------------------------------- gain


@pytest.fixture
def gained(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """The gain of rounds that kept this many rows, for policies of these accuracies, or samples of these scores."""

    def run(new: list[int], accuracies: list[float], held_out: bool = True, min_gain: float | None = 0.01) -> Any:
        inputs: dict[str, Path] = {}
        for number, count in enumerate(new, start=1):
            inputs[f"kept-{number}"] = tmp_path / f"kept-{number}"
            inputs[f"kept-{number}"].mkdir(exist_ok=True)
            of_round = {"prompts": 8, "prompts_kept": count, "completions": 16, "new": count, "kept": count / 16}
            of_round |= {"score": 0.0 if held_out else accuracies[number - 1], "dropped_duplicate": 3}
            (inputs[f"kept-{number}"] / "statistics.json").write_text(json.dumps({"selection": of_round}))
        for number, accuracy in enumerate(accuracies if held_out else ()):
            inputs[f"policy-{number}"] = tmp_path / f"policy-{number}"
            inputs[f"policy-{number}"].mkdir(exist_ok=True)
            (inputs[f"policy-{number}"] / "metrics.json").write_text(json.dumps({"accuracy": accuracy}))
        output = tmp_path / "output"
        output.mkdir(exist_ok=True)
        policies = ("start", *(f"round-{number}" for number in range(1, len(accuracies))))
        metric = "accuracy" if held_out else None
        config = gain.GainConfig(policies=policies, kept=len(new), rounds=4, metric=metric, min_gain=min_gain)
        context: Any = SimpleNamespace(inputs=inputs, output=output)
        return gain.run(context, config), (output / gain.SECTION).read_text()

    return run


def test_a_round_with_enough_gain_does_not_stop_the_rounds(gained) -> None:
    outcome, section = gained([8, 8], [0.5, 0.75, 0.76])
    assert outcome == {"kept": 0.5, "result": "round-2", "gain": 0.01}, "0.76 - 0.75 is 0.01, despite floating point"
    assert "| 2 | 16 | 8 | 0.500 | 8 of 8 | 3 | 0 | — | 0.75 → 0.76 | +0.01 |" in section
    assert "The policy so far is `round-2`" in section


@pytest.mark.parametrize(
    ("accuracies", "min_gain", "result", "why"),
    [
        ([0.5, 0.75, 0.755], 0.01, "round-2", "round 2 brought less than min_gain: accuracy +0.005 of 0.01"),
        ([0.5, 0.75, 0.7], 0.01, "round-1", "round 2 brought no gain: accuracy -0.05"),
        ([0.5, 0.75, 0.75], 0.0, "round-1", "round 2 brought no gain: accuracy +0"),
        ([0.5, 0.4], 0.01, "start", "round 1 brought no gain: accuracy -0.1"),
    ],
)
def test_a_round_without_gain_stops_training_and_the_best_policy_is_the_result(
    gained, accuracies, min_gain, result, why
) -> None:
    outcome, section = gained([8] * (len(accuracies) - 1), accuracies, min_gain=min_gain)
    assert (outcome["result"], outcome["stops"]) == (result, why)
    assert f"**Training ended after {len(accuracies) - 1} of 4 rounds: {why}.**" in section


def test_all_rounds_run_without_a_minimum_gain(gained) -> None:
    outcome, _ = gained([8, 8], [0.5, 0.4, 0.3], min_gain=None)
    assert (outcome["result"], outcome["gain"], "stops" in outcome) == ("round-2", -0.1, False)


def test_a_round_without_kept_rows_stops_training(gained) -> None:
    outcome, _ = gained([8, 0], [0.5, 0.6])
    assert outcome["stops"] == "none of the 16 completions of round 2 is left to train on"
    assert outcome["result"] == "round-1"


def test_without_held_out_prompts_the_samples_of_the_next_round_measure_a_policy(gained) -> None:
    assert "gain" not in gained([8], [0.5], held_out=False)[0]
    outcome, section = gained([8, 8], [0.5, 0.45], held_out=False)
    assert (outcome["result"], outcome["stops"]) == ("start", "round 1 brought no gain: mean score -0.05")
    assert "| 0.5 → 0.45 | -0.05 |" in section
