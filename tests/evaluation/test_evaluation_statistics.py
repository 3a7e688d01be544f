"""Statistics of scored completions, with the expected numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from alignment_core.errors import DataError
from alignment_core.evaluation.statistics import Interval, bootstrap, per_prompt, wilson, win_rate_per_prompt


def rows(*scores: tuple[int, float]) -> list[dict]:
    return [{"prompt": prompt, "reward": score} for prompt, score in scores]


def test_the_mean_of_each_prompt_comes_in_the_order_of_prompt_numbers():
    assert per_prompt(rows((7, 1.0), (2, 0.0), (7, 0.5), (2, 1.0), (2, 0.5)), "reward").tolist() == [0.5, 0.75]


def test_every_completion_meets_every_completion_of_the_baseline():
    # prompt 0: 3 beats both, 1 loses to 2 and ties with 1: (1 + 1 + 0 + ½) / 4; prompt 1: a loss
    mine, theirs = rows((0, 3.0), (0, 1.0), (1, 0.0)), rows((0, 2.0), (0, 1.0), (1, 1.0))
    assert win_rate_per_prompt(mine, theirs, "reward", 0.0).tolist() == [2.5 / 4, 0.0]


def test_differences_up_to_the_margin_are_ties():
    mine, theirs = rows((0, 1.5), (1, 1.6), (2, 0.4)), rows((0, 1.0), (1, 1.0), (2, 1.0))
    assert win_rate_per_prompt(mine, theirs, "reward", 0.5).tolist() == [0.5, 1.0, 0.0]


def test_a_policy_against_itself_wins_half():
    same = rows((0, 1.0), (0, 2.0), (1, 5.0))
    assert win_rate_per_prompt(same, same, "reward", 0.0).tolist() == [0.5, 0.5]


def test_the_same_answer_ties_whatever_its_rewards():
    """Prompt 0: the baseline's answer, by a reward model in bf16 in another batch. Prompt 1: 1.001 ties with its own answer, of
    0.9, and wins against the other one, of 1: (½ + 1) / 2. Rows without an answer are compared by reward alone."""
    mine, theirs = rows((0, 1.001), (1, 1.001)), rows((0, 1.0), (1, 0.9), (1, 1.0))
    assert win_rate_per_prompt(mine, theirs, "reward", 0.0).tolist() == [1.0, 1.0]
    for row, answer in zip([*mine, *theirs], (b"a", b"b", b"a", b"b", b"c"), strict=True):
        row["answer"] = answer
    assert win_rate_per_prompt(mine, theirs, "reward", 0.0).tolist() == [0.5, 0.75]


def test_sums_that_cancel_tie():
    # 0.3 · 1 - 0.1 · 3 is -5.6e-17 in binary, and 0.3 · 0 - 0.1 · 0 is 0
    assert win_rate_per_prompt(rows((0, 0.3 - 0.1 * 3)), rows((0, 0.0)), "reward", 0.0).tolist() == [0.5]
    assert win_rate_per_prompt(rows((0, 2e-6)), rows((0, 0.0)), "reward", 0.0).tolist() == [1.0]


def test_the_number_of_completions_may_differ_but_the_prompts_may_not():
    assert win_rate_per_prompt(rows((0, 1.0), (0, 2.0)), rows((0, 1.0)), "reward", 0.0).tolist() == [0.75]
    with pytest.raises(DataError, match=r"different prompts, 1 and 1: .*max_prompt_length"):
        win_rate_per_prompt(rows((0, 1.0)), rows((1, 1.0)), "reward", 0.0)


def test_equal_values_have_an_interval_of_no_width():
    interval = bootstrap(np.full(5, 0.25), 0.95, 100, seed=0)
    assert interval == Interval(0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("right", "low", "high"),
    [
        # z = 1.960, z² = 3.841. Of no successes the upper end is z² / (n + z²) = 3.841 / 23.841.
        (0, 0.0, 0.1611),
        # middle (10 + 1.921) / 23.841 = ½; half z / (1 + z² / 20) √(¼ / 20 + z² / 1600) = 1.6442 × 0.12207
        (10, 0.2993, 0.7007),
        (20, 0.8389, 1.0),
    ],
)
def test_a_proportion_of_few_prompts_has_the_interval_of_wilson(right, low, high):
    interval = wilson(np.repeat([1.0, 0.0], [right, 20 - right]), 0.95)
    assert interval.mean == right / 20
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_a_single_prompt_has_a_wide_interval():
    # z² / (1 + z²) = 3.841 / 4.841
    assert wilson(np.ones(1), 0.95) == Interval(1.0, pytest.approx(1 - 0.7935, abs=1e-4), 1.0)  # type: ignore[arg-type]


def test_ties_are_half_a_win_and_vary_less_than_wins_and_losses_do():
    # 20 ties: only the two imagined prompts vary, s² = (¼ + ¼) / 21, so trials ¼ × 20 / s² = 210 and the half width is
    # 1.96 / (1 + 3.841 / 210) × √(¼ / 210 + 3.841 / (4 × 210²)) = 0.0670
    ties = wilson(np.full(20, 0.5), 0.95)
    assert (ties.low, ties.high) == (pytest.approx(0.4330, abs=1e-4), pytest.approx(0.5670, abs=1e-4))
    # 6 wins and 14 ties, no loss: a sign test rejects at 2 × ½⁶ = 0.03, and so does the interval at 95 %
    assert wilson(np.repeat([1.0, 0.5], [6, 14]), 0.95).low > 0.5
    # 3 wins: 2 × ½³ = 0.25
    assert wilson(np.repeat([1.0, 0.5], [3, 17]), 0.95).low < 0.5


def test_wilson_and_bootstrap_agree_on_many_prompts():
    values = np.repeat([0.0, 0.25, 0.5, 1.0], 100)
    binomial, resampled = wilson(values, 0.95), bootstrap(values, 0.95, 4000, seed=0)
    assert binomial.mean == resampled.mean
    assert binomial.low == pytest.approx(resampled.low, abs=0.004)
    assert binomial.high == pytest.approx(resampled.high, abs=0.004)


def test_the_interval_is_that_of_the_binomial():
    # Half of 400 prompts are right. The mean of a resample has standard deviation √(¼ / 400) = 0.025,
    # so that 95 % of them lie within 1.96 × 0.025 = 0.049 of one half.
    interval = bootstrap(np.repeat([0.0, 1.0], 200), 0.95, 4000, seed=0)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.451, abs=0.004)
    assert interval.high == pytest.approx(0.549, abs=0.004)


def test_more_confidence_needs_a_wider_interval():
    values = np.repeat([0.0, 1.0], 50)
    narrow, wide = (bootstrap(values, confidence, 1000, seed=0) for confidence in (0.8, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_the_seed_decides_the_interval():
    values = np.linspace(0, 1, 37)
    assert bootstrap(values, 0.95, 200, seed=1) == bootstrap(values, 0.95, 200, seed=1)
    assert bootstrap(values, 0.95, 200, seed=1) != bootstrap(values, 0.95, 200, seed=2)
