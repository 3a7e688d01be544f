"""The user's functions are called on a few rows before a run starts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from alignment.flows.planning import plan
from alignment_core.checks import functions
from alignment_core.checks.functions import called_by
from alignment_core.checks.report import _functions
from alignment_core.checks.rows import answers_to
from alignment_core.data.images import image_part
from alignment_core.execution.base import SamplingPlan
from alignment_core.recipes import GenerationConfig, ResourcesConfig, parse_recipe
from alignment_core.recipes.sections.rewards import CHOICE
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.base import kind_of
from tests.checks.recipes import MODEL, look, questions, rl, sft

ROOT = Path(__file__).parents[2]
CALLS = """
def reward(rows):
    return [1.0 for row in rows] if rows[0]["completion"] == rows[0]["label"] else [1 / 0]

def fails(rows):
    return [len(row["completion"]) / 0 for row in rows]

def silent(completions, **kwargs):
    return [None for _ in completions]

def moody(rows):
    return [1 / 0 if "2?" not in row["prompt"] else 1.0 for row in rows]
"""

ENVIRONMENTS = """
class Works:
    pass

class Breaks:
    def reset(self, prompt, label):
        1 / 0
"""


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("reward", None),
        ("moody", None),  # it gives some rewards: the run decides how many may be missing
        (
            "fails",
            "rl.rewards.0.function: FILE:fails failed: ZeroDivisionError: division by zero (calls.py, line 6), for",
        ),
        ("rewards", "rl.rewards.0.function: FILE has no 'rewards'; did you mean 'reward'?"),
    ],
)
def test_functions_are_called_on_real_rows_and_a_failing_function_is_named_with_its_line(
    store, rows, tmp_path, function, sentence
):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    try:
        problems = look(store, rl(rows, {"function": f"{file}:{function}"})).problems
    except Exception as error:  # a name that is not there is missed when the key is made
        problems = [str(error)]
    assert len(problems) == (sentence is not None)
    assert sentence is None or problems[0].startswith(sentence.replace("FILE", str(file)))


@pytest.mark.parametrize(
    ("missing", "is_failure"),
    [("fail", True), ("ignore", False), (None, False)],  # None: the function has TRL's parameters, so it is ignored
)
def test_a_function_that_always_returns_none_is_a_problem_where_none_is_a_failure(
    store, rows, tmp_path, missing, is_failure
):
    """The meanings of ``missing`` are those of docs/recipes/rewards.md. A run would end at its first step."""
    (tmp_path / "calls.py").write_text(CALLS)
    problems = look(store, rl(rows, {"function": f"{tmp_path}/calls.py:silent", "missing": missing})).problems
    assert len(problems) == is_failure
    assert not is_failure or "calls.py:silent gave no reward, for the prompt" in problems[0]


def test_a_function_that_may_fail_often_is_loaded_and_left_to_the_run(store, rows, tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    recipe = rl(rows, {"function": f"{tmp_path}/calls.py:fails", "max_failed": 0.5})
    assert look(store, recipe).problems == []


def test_a_failing_function_is_reported_before_other_data_sets_are_rendered(store, rows, tmp_path, monkeypatch):
    (tmp_path / "calls.py").write_text(CALLS)
    rendered = []

    def ask(questions, on_parsed):
        for answer in answers_to(questions, on_parsed):
            rendered.append(answer.label)
            yield answer

    monkeypatch.setattr("alignment_core.checks.rows.ask", ask)
    recipe = rl(rows, {"function": f"{tmp_path}/calls.py:fails"}) | {"sft": sft(rows)["sft"]}
    (problem,) = look(store, recipe).problems
    assert "ZeroDivisionError" in problem
    assert rendered == ["rl/prompts"], "sft/data comes first in the recipe, and takes as long again"


def test_functions_of_every_list_of_rewards_are_called_on_the_prompts_of_their_section(store, rows, tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    prompts, fails = {"path": str(rows)}, {"function": f"{tmp_path}/calls.py:fails"}
    recipe = {"method": "iterative-dpo", "name": "demo", "model": MODEL}
    recipe["iterative_dpo"] = {"rounds": 2, "prompts": prompts, "rewards": [{"verifier": "math"}, fails]}
    recipe["evaluation"] = {"prompts": prompts, "rewards": [fails], "verifier": "math"}
    parsed = parse_recipe(recipe)
    functions = _functions(plan(parsed, store).stages, parsed.resources)
    assert {label: set(called) for label, called in functions.items()} == {
        "rounds/prompts": {"iterative_dpo.rewards.0.verifier", "iterative_dpo.rewards.1.function"},
        "evaluation/prompts": {"evaluation.rewards.0.function", "evaluation.verifier"},
    }


def test_a_function_of_a_reward_that_needs_actors_is_not_called(monkeypatch):
    reward, sampling = CHOICE.validate({"function": "f.py:f"}), SamplingPlan(GenerationConfig())
    assert len(list(called_by({"rl.rewards.0": reward}, sampling, ResourcesConfig()))) == 1
    kind = dataclasses.replace(kind_of(reward), actors=True)
    monkeypatch.setattr(functions, "kind_of", lambda reward: kind)
    assert not list(called_by({"rl.rewards.0": reward}, sampling, ResourcesConfig()))


def test_the_row_reader_finds_malformed_rows_without_loading_transformers_or_function_checks(rows):
    rows.write_text("{broken\n")
    (question,) = questions(sft(rows))
    code = (
        "import sys\nfrom alignment_core.checks import rows\nrows.main()\n"
        "names = ('transformers', 'torch', 'ray', 'prefect', 'alignment_core.checks.functions')\n"
        "print([name for name in names if sys.modules.get(name)], file=sys.__stdout__)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps([question]), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "rows.jsonl:1: is not valid JSON" in process[0]
    assert process[1] == "[]"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Works", None),
        ("Missing", "rl.environment.name: FILE has no 'Missing'"),
        (
            "Breaks",
            "rl.environment.name: FILE:Breaks failed: ZeroDivisionError: division by zero (env.py, line 7), for",
        ),
    ],
)
def test_an_environment_is_loaded_also_if_prompts_have_images(tmp_path, name, sentence):
    """It is called for a prompt without an image, behind one whose image is there no more."""
    file = tmp_path / "env.py"
    file.write_text(ENVIRONMENTS)
    sampling = SamplingPlan(GenerationConfig(), environment=EnvironmentConfig(name=f"{file}:{name}"))
    (environment,) = called_by({}, sampling, ResourcesConfig())
    row = {"prompt_text": "?", "label": None, "source": "rows.jsonl:1"}
    image = {**row, "messages": json.dumps([{"role": "user", "content": [image_part("0" * 64)]}])}
    rows = [image, row] if name == "Breaks" else [image]
    problem = environment.problem(rows, 10)
    assert problem is None if sentence is None else problem.startswith(sentence.replace("FILE", str(file)))
