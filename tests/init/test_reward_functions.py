"""`align init --reward`: prompts alone and reward functions, the commonest beginning of GRPO, as a recipe that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.checks.report import check
from alignment_core.checks.rows import answers_to
from alignment_core.errors import UserError
from alignment_core.init import recipe, reward_functions
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.held_out import held_out_file
from alignment_core.init.machine import Machine
from alignment_core.init.recipe import InitRequest, InitResult
from alignment_core.recipes import load_recipe
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


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's process takes seconds to start; tests of the command have it."""
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    monkeypatch.setattr("alignment_core.init.lengths.ask", answers_to)


@pytest.fixture
def run(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(rewards…)`` in a folder with the prompts and ``code/rewards.py``; the recipe lies in another folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "rewards.py").write_text(REWARDS)
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)

    def draft(*rewards: str, **options: Any) -> InitResult:
        output = tmp_path / "recipes" / "recipe.yaml"
        file = jsonl(Path("prompts.jsonl"), ROWS)
        request = InitRequest(str(file), output, **{"model": "scratch", "rewards": rewards, **options})
        result = recipe.draft(request, store, lambda _: None, Machine(0, 16 << 30))
        output.write_text(result.text)
        jsonl(held_out_file(output), result.held_out)
        return result

    return draft


def test_prompts_alone_and_a_function_become_a_recipe_that_passes_its_checks(run: Run, store: Store) -> None:
    found = run("code/rewards.py:three_sentences", "code/rewards.py:on_topic")
    assert found.method == "rl"
    content = yaml.safe_load(found.text)
    functions = [{"function": f"../code/rewards.py:{name}"} for name in ("three_sentences", "on_topic")]
    assert content["rl"]["rewards"] == content["evaluation"]["rewards"] == functions
    assert [one["keep_columns"] for one in content["rl"]["prompts"]["sources"]] == [["topic", "note"]] * 2
    parsed = load_recipe(Path("recipes/recipe.yaml"))
    assert check(plan(parsed, store), parsed.resources).problems == []


@pytest.mark.parametrize("name", ["ours", "length", "on_topic"])
def test_rows_objects_that_can_be_called_and_coroutine_functions_are_rewards(name: str, run: Run, store: Store) -> None:
    run(f"code/rewards.py:{name}")
    parsed = load_recipe(Path("recipes/recipe.yaml"))
    assert check(plan(parsed, store), parsed.resources).problems == []


def test_a_class_is_refused_by_the_checks_with_what_to_write(run: Run, store: Store) -> None:
    run("code/rewards.py:Length")
    parsed = load_recipe(Path("recipes/recipe.yaml"))
    (problem,) = check(plan(parsed, store), parsed.resources).problems
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
def test_a_name_that_names_no_function_is_refused_with_the_likely_one(run: Run, reward: str, says: str) -> None:
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
    assert reward_functions.columns_for(ROWS, mapping) == ["topic", "note"]
    assert reward_functions.columns_for([*ROWS, {"prompt": "?", "topic": "sky"}], mapping) == ["topic"]
    assert reward_functions.columns_for([{"prompt": "?", "label": "1", "completion": "x"}], mapping) == []
