"""From scores to metrics and the report: which interval each metric has, its level, and how many prompts it is over."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from alignment_core.recipes import GenerationConfig
from alignment_core.rollout.schemas import rollout_schema, write_table
from alignment_core.stages.evaluate import EvaluateConfig, run
from alignment_core.stages.report import cell, columns_of, decoding_sentence, markdown

ROW = {"tokens": 3, "finish_reason": "stop", "reward": None, "reference_logp": None, "policy_logp": 0.0}


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def evaluate(scores: list[dict[str, Any]], others: dict[str, Any] | None = None, **config: Any) -> dict[str, float]:
        # The rows themselves: the table between the two stages is tested where it is written.
        monkeypatch.setattr("alignment_core.stages.evaluate.read_scores", lambda folder: folder)
        context: Any = SimpleNamespace(
            inputs={"scores": scores, **(others or {})}, output=tmp_path, derive=lambda *_: 0
        )
        run(context, EvaluateConfig(**config))
        metrics: dict[str, float] = json.loads((tmp_path / "metrics.json").read_text())
        return metrics

    return evaluate


def test_no_right_answer_of_twenty_is_not_certainty(evaluated):
    scores = [{**ROW, "prompt": i, "verifier": 0.0} for i in range(20)]
    metrics = evaluated(scores)
    assert (metrics["accuracy"], metrics["accuracy.low"], metrics["accuracy.n"]) == (0, 0, 20)
    assert metrics["accuracy.high"] == pytest.approx(0.1611, abs=1e-4)
    assert cell(metrics, "accuracy") == "0.000 [0.000, 0.161] n=20"


def test_pass_at_k_is_the_probability_of_a_right_completion_among_k(evaluated):
    # 4 completions each; right: 0, 1, 2 (half right does not count), 4. pass@2 = 1 - C(4 - c, 2) / C(4, 2): 0, 1/2, 5/6, 1
    right: list[list[float]] = [[0, 0, 0, 0.5], [1, 0, 0, 0], [0, 1, 1, 0.9], [1, 1, 1, 1]]
    scores = [{**ROW, "prompt": i, "verifier": float(correct)} for i, values in enumerate(right) for correct in values]
    # a single verdict is too few for pass@2
    scores += [{**ROW, "prompt": 4, "verifier": verdict} for verdict in (1.0, None, None, None)]
    metrics = evaluated(scores, pass_at=(1, 2))
    assert metrics["pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    assert (metrics["pass@2.n"], metrics["pass@1.n"]) == (4, 5)
    assert metrics["pass@1"] == pytest.approx((0 + 1 / 4 + 2 / 4 + 1 + 1) / 5)
    assert metrics["pass@2.low"] < metrics["pass@2"] < metrics["pass@2.high"] <= 1
    assert [name for name, _ in columns_of({"a": metrics, "b": {"pass@10": 0.5, "kl": 1.0}})] == [
        *("accuracy", "kl", "pass@1", "pass@2", "pass@10", "length"),
    ]


def test_rewards_keep_their_bootstrap_and_prompts_without_a_score_are_not_counted(evaluated):
    scores = [{**ROW, "prompt": i, "verifier": None if i else 1.0, "reward": 2.0} for i in range(5)]
    metrics = evaluated(scores)
    assert (metrics["reward.low"], metrics["reward.high"], metrics["reward.n"]) == (2, 2, 5)
    assert metrics["accuracy.n"] == 1


def test_the_mean_length_has_an_interval_over_prompts(evaluated):
    # Prompts of 2 tokens, and of 4, 5 and 6: (2 + 5) / 2; a resampled mean of two prompts lies between theirs.
    lengths = [(0, 2), (1, 4), (1, 5), (1, 6)]
    scores = [{**ROW, "prompt": prompt, "verifier": None, "tokens": tokens} for prompt, tokens in lengths]
    metrics = evaluated(scores)
    assert (metrics["length"], metrics["length.n"]) == (3.5, 2)
    assert (metrics["length.low"], metrics["length.high"]) == (2, 5)


def test_each_of_several_rewards_has_a_mean_and_missing_rewards_are_counted(evaluated):
    given = [([1.0, 4.0], 5.0), ([0.0, 2.0], 2.0), ([1.0, None], None)]
    scores = [
        {**ROW, "prompt": i, "verifier": None, "rewards": rewards, "reward": all}
        for i, (rewards, all) in enumerate(given)
    ]
    metrics = evaluated(scores)
    assert (metrics["reward"], metrics["reward.n"], metrics["failed_rewards"]) == (3.5, 2, 1)
    assert (metrics["reward_0"], metrics["reward_1"]) == (pytest.approx(2 / 3), 3.0)


def test_perplexity_under_the_baseline_is_over_all_tokens(evaluated):
    """Two completions of 3 tokens: exp((2 + 4) / 6) = e, exp((5 + 7) / 6) = e² by the policy itself."""
    scores = [
        {**ROW, "prompt": i, "verifier": 1.0, "reference_logp": reference, "policy_logp": policy}
        for i, (reference, policy) in enumerate([(-2.0, -5.0), (-4.0, -7.0)])
    ]
    of_itself = [{**row, "reference_logp": None} for row in scores]
    assert evaluated(scores)["baseline_perplexity"] == pytest.approx(2.718282)
    assert evaluated(of_itself, samples_all_tokens=True)["baseline_perplexity"] == pytest.approx(7.389056)
    assert "baseline_perplexity" not in evaluated(of_itself), "of top_p, log-probabilities are not those of the policy"


def test_the_report_names_the_configured_confidence_level(evaluated):
    metrics = evaluated([{**ROW, "prompt": i, "verifier": i % 2} for i in range(8)], confidence=0.9)
    content = {
        "title": "Run one",
        "baseline": "sft",
        "policies": {"sft": metrics},
        "against": {},
        "notes": {},
        "overlap": {"prompts": 8, "overlap": 0, "shared": {}},
    }
    text = markdown(content, ["sft"])
    assert "Intervals are at 90 %, over n prompts" in text
    assert "95 %" not in text
    # z = 1.6449, z² = 2.7055: half 1.6449 / (1 + 2.7055 / 8) √(1 / 32 + 2.7055 / 256) = 0.2514
    assert "| sft | 0.500 [0.249, 0.751] n=8 |" in text


def test_the_report_says_which_interval_each_metric_has(evaluated):
    """Wilson's at 95 % for one of four, z = 1.96: (0.25 + 0.4802 ± 1.96 √(0.1875 / 4 + 0.0600)) / (1 + 0.9604)."""
    scores = [{**ROW, "prompt": i, "verifier": float(i == 0), "reward": 7.0} for i in range(4)]
    metrics = evaluated(scores, {"baseline_scores": scores}, pass_at=(1,))
    for name in ("accuracy", "pass@1"):
        assert (metrics[f"{name}.low"], metrics[f"{name}.high"]) == pytest.approx((0.0456, 0.6994), abs=1e-3)
    assert metrics["win_rate.low"] < metrics["win_rate"] == 0.5 < metrics["win_rate.high"], "also of four ties"
    for name, value in (("reward", 7), ("length", 3)):
        assert (metrics[f"{name}.low"], metrics[f"{name}.high"]) == (value, value), "no resample of equals differs"
    content = {"title": "", "baseline": "sft", "policies": {"sft": metrics}, "against": {}, "notes": {}}
    text = markdown(content | {"overlap": {"prompts": 4, "overlap": 0, "shared": {}}}, ["sft"])
    assert "Wilson's for accuracy, pass@k and win rates, bootstrap for rewards, KL and tokens." in text


def test_the_report_lists_excluded_completions(evaluated):
    """Three completions, one without a reward; four pairs, one without a verdict."""
    scores = [{**ROW, "prompt": i, "verifier": None, "reward": reward} for i, reward in enumerate((1.0, 2.0, None))]
    metrics = {**evaluated(scores), "unjudged_pairs": 1.0, "pairs": 4.0}
    content = {
        "title": "Run one",
        "baseline": "sft",
        "policies": {"sft": metrics, "dpo": {"confidence": 0.95, "length": 3.0}},
        "against": {},
        "notes": {},
        "overlap": {"prompts": 3, "overlap": 0, "shared": {}},
    }
    text = markdown(content, ["sft", "dpo"])
    assert "sft: 1 of 3 completions without a reward or score are left out." in text
    assert "sft: 1 of 4 pairs without a verdict of the judge are left out." in text
    assert "dpo:" not in text


@pytest.mark.parametrize(
    ("generation", "sentence"),
    [
        ({"num_generations": 1, "temperature": 0}, "Answers are greedy (temperature 0), one for each prompt."),
        ({"num_generations": 4}, "Answers are sampled at temperature 1, 4 for each prompt."),
        (
            {"num_generations": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 20},
            "Answers are sampled at temperature 0.7, top_p 0.9, top_k 20, one for each prompt.",
        ),
    ],
)
def test_the_report_describes_how_answers_were_sampled(evaluated, generation, sentence):
    assert decoding_sentence(GenerationConfig(**generation)) == sentence
    content = {
        "title": "Run one",
        "baseline": "sft",
        "policies": {"sft": evaluated([{**ROW, "prompt": 0, "verifier": 1.0}])},
        "against": {},
        "decoding": sentence,
        "notes": {},
        "overlap": {"prompts": 1, "overlap": 0, "shared": {}},
    }
    assert f"\n{sentence}\n" in markdown(content, ["sft"])


def test_the_kl_to_the_initial_model_is_measured_beside_that_to_the_baseline(evaluated):
    # Gaps of two completions of a prompt: 3 and 1 to the baseline, 10 and 30 to the model where the nights began.
    scores = [
        {**ROW, "prompt": 0, "verifier": 1.0, "policy_logp": -2.0, "reference_logp": logp} for logp in (-5.0, -3.0)
    ]
    to_origin = [{**row, "reference_logp": logp} for row, logp in zip(scores, (-12.0, -32.0), strict=True)]
    metrics = evaluated(scores, {"scores_to_origin": to_origin})
    assert (metrics["kl"], metrics["kl_to_model"], metrics["kl_to_model.n"]) == (2, 20, 1)
    assert [title for _, title in columns_of({"a": metrics})][-4:] == [
        "KL (nats)",
        "KL to `model` (nats)",
        "perplexity under the baseline",
        "mean tokens",
    ]
    assert "kl_to_model" not in evaluated(scores)


def test_equal_completions_tie_whatever_their_rewards(evaluated, tmp_path):
    """A reward model in bf16 gives the same completion 1 and 1.001. Without the completions, as in flows that do not pass them
    on, rewards alone decide; of another completion the higher reward wins."""

    def completions(name: str, *ids: list[int]) -> Path:
        (tmp_path / name).mkdir()
        rows = [
            {
                "prompt": i,
                "sample": 0,
                "prompt_ids": [1],
                "completion_ids": completion,
                "logps": [-1.0] * len(completion),
            }
            for i, completion in enumerate(ids)
        ]
        write_table(rows, rollout_schema(), tmp_path / name / "shard-00000.parquet")
        return tmp_path / name

    mine, theirs = (
        [{**ROW, "prompt": i, "verifier": None, "reward": reward} for i in range(2)] for reward in (1.001, 1.0)
    )
    same = completions("same", [5, 2], [6, 2])
    beside = {"baseline_scores": theirs, "rollouts": same}
    assert evaluated(mine, {"baseline_scores": theirs})["win_rate"] == 1
    assert evaluated(mine, {**beside, "baseline_rollouts": same})["win_rate"] == 0.5
    assert evaluated(mine, {**beside, "baseline_rollouts": completions("other", [5, 2], [6, 7, 2])})["win_rate"] == 0.75


def test_prompts_that_are_in_the_data_several_times_count_once(evaluated, tmp_path):
    """Greedy answers to 4 prompts, each of which is 50 times in the data: two are right. Wilson's interval of 2 of 4 is
    [0.150, 0.850]; that of 100 of 200, which it is not, would be [0.431, 0.569]."""
    pq.write_table(pa.table({"prompt_ids": [[7, i % 4] for i in range(200)]}), tmp_path / "train.parquet")
    (tmp_path / "verdicts.json").write_text(
        json.dumps({"prompts": {str(i): i % 4 / 4 for i in range(200)}, "failed": 0})
    )
    scores = [{**ROW, "prompt": i, "verifier": float(i % 4 < 2)} for i in range(200)]
    wrong = [{**row, "verifier": 0.0} for row in scores]
    metrics = evaluated(scores, {"baseline_scores": wrong, "prompts": tmp_path, "verdicts": tmp_path})
    assert (metrics["accuracy"], metrics["accuracy.n"], metrics["judged_win_rate.n"]) == (0.5, 4, 4)
    assert (metrics["accuracy.low"], metrics["accuracy.high"]) == (
        pytest.approx(0.1500, abs=1e-4),
        pytest.approx(0.8500, abs=1e-4),
    )
    assert (metrics["win_rate"], metrics["win_rate.n"]) == (0.75, 4)
    assert metrics["judged_win_rate"] == pytest.approx((0 + 0.25 + 0.5 + 0.75) / 4)
    assert "position_changed" not in metrics, "the judge compared no pair"
