"""The stage that measures the best of n: from scores to its table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alignment_core.rollout.schemas import SCORES
from alignment_core.stages.best_of_n import SECTION, BestOfNConfig, run


def measured(folder: Path, *scores: tuple[int, float | None, list[float] | None]) -> tuple[dict[str, Any], str]:
    """Metrics and table of completions, each with its prompt, the verifier's score and two rewards."""
    rows = [{"prompt": prompt, "verifier": right, "reward": None, "rewards": given} for prompt, right, given in scores]
    types = pa.schema(
        [
            ("prompt", pa.int64()),
            ("verifier", pa.float64()),
            ("reward", pa.float64()),
            ("rewards", pa.list_(pa.float64())),
        ]
    )
    (folder / "scores").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, types), folder / "scores" / SCORES)
    context: Any = SimpleNamespace(inputs={"scores": folder / "scores"}, output=folder)
    return run(context, BestOfNConfig(rewards=("process", "outcome"))), (folder / SECTION).read_text()


def test_completions_without_a_verdict_or_a_reward_are_not_counted(tmp_path: Path) -> None:
    """By hand: of prompt 0 the right one has the higher first and the lower second reward; prompt 1 has no verdicts."""
    metrics, _ = measured(tmp_path, (0, 1.0, [2.0, 1.0]), (0, 0.0, [1.0, 2.0]), (0, 1.0, None), (1, None, [1.0, 1.0]))
    assert metrics == {"prompts": 1, "n": 2, "best_0": 1.0, "best_1": 0.0}


def test_without_a_prompt_that_has_both_scores_the_stage_warns_and_ends(tmp_path: Path) -> None:
    """As where a verifier has no label, or every reward failed: nothing is measured, and the run's other results stay."""
    metrics, section = measured(tmp_path, (0, 1.0, None), (1, None, [1.0, 2.0]))
    assert (metrics["prompts"], metrics["n"]) == (0, 0)
    assert not {"best_0", "best_1"} & metrics.keys()
    assert metrics["warnings"] == [
        "no completion has both a score of the verifier and all rewards: nothing was measured"
    ]
    assert "No completion has both a score of the verifier and all rewards" in section
