"""`align init --reward`: prompts alone and reward functions, the commonest beginning of GRPO, as a recipe that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment_core.artifacts import Store
from alignment_core.errors import UserError
from alignment_core.init import recipe
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.recipe import InitResult
from tests.init.conftest import Draft, problems
from tests.init.rows_of_kinds import jsonl

REWARDS = """
def three_sentences(completions, **kwargs):
    return [float(one.count(".") == 3) for one in completions]

async def on_topic(completions, topic):
    return [float(subject in one) for one, subject in zip(completions, topic)]

def ours(rows):
    return [float(len(row["completion"])) for row in rows]

class Length:
    def __call__(self, completions, **kwargs):
        return [float(len(one)) for one in completions]

length = Length()
"""
ROWS = [{"prompt": f"Tell me about {number}.", "topic": "sea", "note": {"id": number}} for number in range(60)]
Run = Callable[..., InitResult]


@pytest.fixture
def run(tmp_path: Path, draft: Draft, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(rewards…)`` in a folder with the prompts and ``code/rewards.py``; the recipe lies in another folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "rewards.py").write_text(REWARDS)
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)

    def drafted(*rewards: str, **options: Any) -> InitResult:
        file = jsonl(Path("prompts.jsonl"), ROWS)
        return draft(file, output=tmp_path / "recipes" / "recipe.yaml", rewards=rewards, **options)

    return drafted


def test_prompts_alone_and_a_function_become_a_recipe_that_passes_its_checks(run: Run, store: Store) -> None:
    result = run("code/rewards.py:three_sentences", "code/rewards.py:on_topic")
    assert result.method == "rl"
    content = yaml.safe_load(result.text)
    functions = [{"function": f"../code/rewards.py:{name}"} for name in ("three_sentences", "on_topic")]
    assert content["rl"]["rewards"] == content["evaluation"]["rewards"] == functions
    assert [source["keep_columns"] for source in content["rl"]["prompts"]["sources"]] == [["topic", "note"]] * 2
    assert problems(Path("recipes/recipe.yaml"), store) == []


@pytest.mark.parametrize("name", ["ours", "length", "on_topic"])
def test_rows_objects_that_can_be_called_and_coroutine_functions_are_rewards(name: str, run: Run, store: Store) -> None:
    run(f"code/rewards.py:{name}")
    assert problems(Path("recipes/recipe.yaml"), store) == []


def test_a_class_as_reward_is_refused_with_the_correct_form(run: Run, store: Store) -> None:
    run("code/rewards.py:Length")
    (problem,) = problems(Path("recipes/recipe.yaml"), store)
    assert "is a class: name a function, or an object of it" in problem
    assert "`reward = Length(…)`" in problem


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("code/rewards.py:tree_sentences", r"code/rewards\.py has no 'tree_sentences'; did you mean 'three_sentences'\?"),
        ("code/rewards.py", r"neither .*; add the function, as in code/rewards\.py:FUNCTION"),
        ("code.rewards.ours", r"neither .*; did you mean code/rewards\.py:ours\?"),
        ("code.rewards:ours", r"no module 'code\.rewards' on Python's path; write code/rewards\.py:ours"),
        ("other.py:ours", r"no file other\.py$"),
    ],
)  # fmt: skip
def test_an_unknown_function_is_refused_with_the_nearest_name(run: Run, reward: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        run(reward)
    assert not Path("recipes/recipe.yaml").exists()


def test_a_reward_with_another_method_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match="--reward is for --method rl"):
        run("code/rewards.py:ours", method="generate")
    assert run("code/rewards.py:ours", method="grpo").method == "rl"


def test_rl_without_a_right_answer_names_the_option(run: Run) -> None:
    with pytest.raises(UserError, match=r"or a reward function of yours with --reward file\.py:function"):
        run(method="rl")


def test_columns_that_every_row_has_are_kept_for_the_functions() -> None:
    mapping = ColumnMapping("prompts", "prompts", {"prompt": "prompt"})
    assert recipe.columns_for_rewards(ROWS, mapping) == ["topic", "note"]
    assert recipe.columns_for_rewards([*ROWS, {"prompt": "?", "topic": "sky"}], mapping) == ["topic"]
    assert recipe.columns_for_rewards([{"prompt": "?", "label": "1", "completion": "x"}], mapping) == []
