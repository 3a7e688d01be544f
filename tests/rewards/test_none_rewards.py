"""None in place of a reward: which rewards ignore it, the sum of the other rewards, and warnings.

The expected values are those of TRL 1.16's ``GRPOTrainer``: None becomes NaN, a completion's rewards are summed without NaN
(``nansum``), and a completion whose rewards are all NaN counts neither in its group's mean nor in the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alignment_core.errors import DataError
from alignment_core.execution.stopwatch import Stopwatch
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.base import REFUSE_UNUSED
from alignment_core.recipes.sections.data import DataSource
from alignment_core.recipes.sections.rewards import CHOICE, RewardConfig
from alignment_core.recipes.sections.rl import AdvantageConfig, KlConfig, RlConfig
from alignment_core.rewards.aggregation import RunningMean, rewards_as_given, total_rewards
from alignment_core.rewards.base import Opening, content
from alignment_core.rewards.results import Account, numbers, reasons
from alignment_core.rewards.sources import RewardSources
from alignment_core.rollout.advantages import add_advantages
from alignment_core.rollout.rollout import Rollout
from alignment_core.stages.rl.rewards import REFILLS, Rewards
from alignment_core.training.step_data import StepData
from tests.rewards.reward_server import Server
from tests.rollout.rollouts import rollout

SOURCE = """
def maths(completions, task, **kwargs):
    return [float(one) if kind == "maths" else None for one, kind in zip(completions, task)]

def coding(completions, task, log_metric, **kwargs):
    log_metric("length", 1.0)
    return [2 * float(one) if kind == "code" else None for one, kind in zip(completions, task)]

async def waiting(completions, task, **kwargs):
    return maths(completions, task)

def ours(rows):
    return [None if row["task"] != "maths" else float(row["completion"]) for row in rows]

def score(prompt, completion, label):
    return None

def of_the_trainer(completions, trainer_state, **kwargs):
    return [0.0] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "tasks.py").write_text(SOURCE)
    return f"{tmp_path}/tasks.py"


def reward(**fields: Any) -> RewardConfig:
    config: RewardConfig = CHOICE.validate(fields)
    return config


@pytest.fixture
def open_rewards() -> Iterator[Any]:
    opened = []

    def open_all(*configs: RewardConfig) -> RewardSources:
        resources = ResourcesConfig(reward_timeout_seconds=20, reward_processes=1)
        opened.append(RewardSources(configs, Opening("rl.rewards", resources, tokenizer=byte_tokenizer())))
        return opened[-1]

    yield open_all
    for sources in opened:
        sources.stop()


def rows(*tasks: tuple[str, str], group_size: int = 1) -> list[dict[str, Any]]:
    """One completion for each (task, completion)."""
    return [
        {
            "source": f"p.jsonl:{number}",
            "group": number // group_size,
            "task": task,
            "prompt_text": f"prompt {number}",
            "completion_text": completion,
            "label": "1",
            "prompt_ids": [1],
            "completion_ids": [2],
            "finish_reason": "stop",
        }
        for number, (task, completion) in enumerate(tasks)
    ]


@pytest.mark.parametrize("maths", ["maths", "waiting"])
def test_functions_of_trl_leave_the_rows_of_other_tasks_to_each_other(file: str, open_rewards: Any, maths: str) -> None:
    given = rows(("maths", "1"), ("code", "3"), ("other", "5"))
    sources = open_rewards(reward(function=f"{file}:{maths}"), reward(function=f"{file}:coding"))
    first, second = sources(given)
    assert (numbers(first), numbers(second)) == ([1.0, None, None], [None, 6.0, None])
    assert [reasons(row) for row in zip(first, second, strict=True)] == [None, None, ["none_given", "none_given"]]
    assert not sources.failed, "nothing of this is a failure"


def test_the_column_by_which_functions_tell_tasks_apart_may_be_called_task(file: str, open_rewards: Any) -> None:
    """TRL's own example of several tasks has a column `task`."""
    assert DataSource(path="p.jsonl", keep_columns=("task", "source")).keep_columns == ("task", "source")
    kept = [
        {**row, "task": None, "columns": f'{{"task": "{row["task"]}"}}'} for row in rows(("maths", "1"), ("code", "3"))
    ]
    sources = open_rewards(reward(function=f"{file}:maths"), reward(function=f"{file}:coding"))
    assert [numbers(rewards_of) for rewards_of in sources(kept)] == [[1.0, None], [None, 6.0]]


@pytest.mark.parametrize(
    ("function", "missing", "is_failure"),
    [
        ("maths", None, False),
        ("maths", "ignore", False),
        ("maths", "fail", True),
        ("ours", None, True),
        ("ours", "ignore", False),
        ("ours", "fail", True),
    ],
)
def test_missing_decides_the_meaning_of_none_except_in_trls_functions(
    file: str, open_rewards: Any, function: str, missing: str | None, is_failure: bool
) -> None:
    config = reward(function=f"{file}:{function}", missing=missing, max_failed=0.5)
    sources = open_rewards(config)
    assert numbers(sources(rows(("maths", "1"), ("code", "3")))[0]) == [1.0, None]
    assert sources.failed == ({"none_given": 1} if is_failure else {})


def test_null_of_an_endpoint_and_none_of_a_verifier_are_failures_unless_ignored(file: str, open_rewards: Any) -> None:
    server = Server(lambda _: (200, b'{"rewards": [null]}'))
    for config in ({"urls": server.url}, {"verifier": f"{file}:score"}):
        ignoring = open_rewards(reward(**config, missing="ignore"))
        assert (ignoring(rows(("maths", "1"))), ignoring.failed) == ([[None]], {})
        with pytest.raises(DataError, match="gave no reward"):
            open_rewards(reward(**config, max_failed=0))(rows(("maths", "1")))
    server.end()


def test_a_model_never_returns_none_so_the_field_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`missing` has no effect for `reward_model`"):
        CHOICE.validate({"reward_model": "ours", "missing": "ignore"}, REFUSE_UNUSED)  # as where a recipe is read


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_failures(value: float) -> None:
    account = Account("f", 0.0, "rl.rewards.0.max_failed", missing="ignore")
    with pytest.raises(DataError, match="a finite number"):
        account.settle(rows(("maths", "1")), (answer for answer in [(0, value)]))


def test_a_run_ended_by_none_names_the_field_that_ignores_none(file: str, open_rewards: Any) -> None:
    says = r"gave no reward, .*; `missing: ignore` leaves it to the other rewards; 0 of 1 completions may lack a reward"
    with pytest.raises(DataError, match=says):
        open_rewards(reward(function=f"{file}:ours", max_failed=0))(rows(("code", "1")))


def test_a_function_that_needs_trls_trainer_state_is_refused_with_the_fix(file: str, open_rewards: Any) -> None:
    with pytest.raises(DataError, match=r"TRL's `trainer_state` is not passed here: take the parameter out, or give"):
        open_rewards(reward(function=f"{file}:of_the_trainer", max_failed=0))(rows(("code", "1")))


def test_ignored_completions_do_not_use_up_the_share_that_may_fail() -> None:
    account = Account("f", 0.25, "rl.rewards.0.max_failed", window=4, missing="ignore")
    assert account.settle(rows(*[("code", "1")] * 4), (answer for answer in enumerate([None, None, None, 1.0]))) == [
        None,
        None,
        None,
        1.0,
    ]
    assert account.recent == "0000"


RAW: list[list[float | None]] = [[1.0, None], [None, 2.0], [None, None], [0.0, 4.0]]
"""Of two rewards with the weights 1 and 0.5, for the four completions of one prompt: sums 1, 1, none, 0 + 2 = 2."""


def section(**fields: Any) -> RlConfig:
    sources = [{"function": "f.py:f"}, {"function": "g.py:g", "weight": 0.5}]
    prompts = {"path": "p.jsonl"}
    return RlConfig.model_validate({"prompts": prompts, "rewards": sources, "prompts_per_step": 1, **fields})


def rewards_of(raw: Sequence[Sequence[float | None]], config: RlConfig) -> Rewards:
    """With sources that return the rewards ``raw`` [S][R] for any completions."""
    sources: Any = lambda _: [list(column) for column in zip(*raw, strict=True)]  # noqa: E731
    return Rewards(config, sources, Stopwatch(), cost={})


def sampled(count: int, group: int = 0) -> list[Rollout]:
    return [rollout([True], group=group) for _ in range(count)]


class Sampler:
    """Completions of a new prompt, rewarded, each time; ``sampled`` counts the prompts."""

    def __init__(self, rewards: Rewards, count: int) -> None:
        self.rewards = rewards
        self.count = count
        self.sampled = 0

    def next_batch(self, prompts: int) -> list[Rollout]:
        self.sampled += prompts
        return self.rewards.add_rewards(sampled(self.count, group=self.sampled))


def test_advantages_are_those_of_the_rewards_that_there_are() -> None:
    """The mean of 1, 1 and 2 is 4/3: advantages -1/3, -1/3 and 2/3. The third completion has no reward, does not count in the
    mean and is not trained on, where TRL sets its advantage to 0. A plain sum with None as 0 would have the mean 1, and
    the third completion the advantage -1."""
    rewards = rewards_of(RAW, section())
    rollouts, metrics = rewards.next_batch(Sampler(rewards, 4), 0)  # type: ignore[arg-type]
    totals = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    assert totals == [1.0, 1.0, 2.0]
    assert [rollout.failures for rollout in rollouts if not rollout.used] == [["none_given", "none_given"]]
    assert (metrics["rewards/f/mean"], metrics["rewards/g/mean"]) == (0.5, 3.0), (
        "the means of what each function returned, as TRL logs them"
    )

    data = StepData.of([[1]] * 3, [[2]] * 3, [[True]] * 3, [0] * 3)
    add_advantages(data, totals, AdvantageConfig(estimator="group"), KlConfig(), 0.0)
    np.testing.assert_allclose(data.numbers["advantages"], [-1 / 3, -1 / 3, 2 / 3], rtol=1e-6)


def test_advantages_with_many_patterns_of_none_are_those_of_trls_formula() -> None:
    """``nansum`` of weighted rewards over the functions, less ``nanmean`` over the group's completions that have any."""
    random = np.random.default_rng(3)
    raw = np.where(random.random((24, 3)) < 0.5, np.nan, random.normal(size=(24, 3)))
    raw[[5, 6, 13]] = np.nan
    groups, weights = np.repeat(np.arange(6), 4), np.array([1.0, 0.5, -2.0])
    rewards = np.where(np.isnan(raw).all(axis=1), np.nan, np.nansum(raw * weights, axis=1))
    trls = rewards - np.nanmean(rewards.reshape(6, 4), axis=1).repeat(4)
    rewarded = ~np.isnan(rewards)
    assert not rewarded.all()
    assert len({*groups[rewarded]}) == 6

    configs = [reward(verifier="task", weight=weight) for weight in weights]
    total = total_rewards(raw[rewarded], groups[rewarded], configs, [RunningMean() for _ in configs])
    count = int(rewarded.sum())
    data = StepData.of([[1]] * count, [[2]] * count, [[True]] * count, groups[rewarded].tolist())
    add_advantages(data, total.tolist(), AdvantageConfig(estimator="group"), KlConfig(), 0.0)
    np.testing.assert_allclose(data.numbers["advantages"], trls[rewarded], rtol=1e-5, atol=1e-6)


def test_the_mean_and_deviation_of_a_reward_are_over_its_scored_completions() -> None:
    """By hand, as TRL's `normalize_then_sum` but for its deviation's divisor: the first reward has 1 and 0 (mean 0.5,
    deviation 0.5), the second 2 and 4 (mean 3, deviation 1, weight 0.5)."""
    raw = np.array(RAW, float)
    configs = [reward(verifier="task", normalise="group"), reward(verifier="task", normalise="group", weight=0.5)]
    total = total_rewards(raw, np.zeros(4, int), configs, [RunningMean(), RunningMean()])
    first, second = 0.5 / 0.5001, 0.5 * 1 / 1.0001
    np.testing.assert_allclose(total[[0, 1, 3]], [first, -second, -first + second], rtol=1e-12)
    assert rewards_as_given(raw, configs).tolist() == [1.0, 1.0, 0.0, 2.0]


def test_a_filter_compares_the_sums_of_the_rewards_that_there_are() -> None:
    differ = rewards_of([[1.0, None], [None, 1.0]], section(filter={})).add_rewards(sampled(2))  # 1 and 0.5 · 1
    equal = rewards_of([[1.0, None], [None, 2.0]], section(filter={})).add_rewards(sampled(2))  # 1 and 0.5 · 2
    assert [rollout.used for rollout in differ + equal] == [True, True, False, False]


def test_counts_of_missing_rewards_are_warned_of_and_continue_after_a_resume() -> None:
    rewards = rewards_of(RAW, section())
    rewards.next_batch(Sampler(rewards, 4), 0)  # type: ignore[arg-type]
    again = rewards_of(RAW, section())
    again.restore(rewards.state)
    again.next_batch(Sampler(again, 4), 1)  # type: ignore[arg-type]
    first, second, both = again.warnings()
    assert first.startswith(
        "rl.rewards.0: the function f.py:f returned None for 2 of 8 completions that have other rewards"
    )
    assert second.startswith(
        "rl.rewards.1: the function g.py:g returned None for 2 of 8 completions that have other rewards"
    )
    assert both.startswith("rl.rewards: 2 of 8 completions have no reward, because every reward returned None")


def test_a_step_without_any_reward_samples_further_prompts_and_then_ends_with_a_sentence() -> None:
    rewards = rewards_of([[None, None]], section())
    sampler = Sampler(rewards, 1)
    with pytest.raises(
        DataError,
        match=r"^step 3: no completion has a reward, of 4 prompts that were sampled; at least one of rl\.rewards",
    ):
        rewards.next_batch(sampler, 3)  # type: ignore[arg-type]
    assert sampler.sampled == 1 + REFILLS

    raw: list[list[float | None]] = [[None, None]]
    sources: Any = lambda _: [[value] for value in raw[0]]  # noqa: E731
    rewards = Rewards(section(), sources, Stopwatch(), cost={})
    sampler = Sampler(rewards, 1)
    next_batch = sampler.next_batch

    def then_rewarded(prompts: int) -> list[Rollout]:
        rollouts = next_batch(prompts)
        raw[0] = [1.0, None]
        return rollouts

    sampler.next_batch = then_rewarded  # type: ignore[method-assign]
    rollouts, _ = rewards.next_batch(sampler, 3)  # type: ignore[arg-type]
    assert [rollout.used for rollout in rollouts] == [True, False], "the one with a reward first"


def test_a_recipe_without_the_field_keeps_its_keys() -> None:
    assert "missing" not in content([reward(verifier="task")], "rl.rewards")[0]
    assert content([reward(verifier="task", missing="ignore")], "rl.rewards")[0]["missing"] == "ignore"
