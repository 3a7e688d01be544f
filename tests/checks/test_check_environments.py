"""Chat templates that cannot show an environment's answers are refused before a run starts, not while sampling."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.checks.report import check
from alignment_core.recipes import parse_recipe
from tests.checks.recipes import look, rl
from tests.environments.test_tool_calls import HERMES, LLAMA, SCHEMAS, calling

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSED = (
    "rl/prompts: rl.environment.role: a turn cannot be answered by a message of the role 'tool': the chat template"
)


def with_tools(rows: Path, folder: Path, **prompts: Any) -> dict[str, Any]:
    (folder / "tools.py").write_text("def add(a, b):\n    return a + b\n")
    recipe = rl(rows, {"environment": True})
    recipe["rl"]["environment"] = {
        "name": "alignment_core.environments.tools:Tools",
        "options": {"tools": [f"{folder / 'tools.py'}:add"], "verifier": "task"},
        "role": "tool",
    }
    recipe["rl"]["prompts"] |= prompts
    return recipe


def test_a_template_without_the_role_of_the_answers_is_refused(store: Store, rows: Path, tmp_path: Path) -> None:
    """The byte tokenizer's own template raises for roles other than system, user and assistant."""
    (problem,) = look(store, with_tools(rows, tmp_path)).problems
    assert problem.startswith(REFUSED)
    assert look(store, with_tools(rows, tmp_path, chat_template=TEMPLATE)).problems == []


def test_a_template_without_tools_is_refused_also_if_prompts_are_cached(
    store: Store, rows: Path, tmp_path: Path
) -> None:
    parsed = parse_recipe(with_tools(rows, tmp_path))
    planned = plan(parsed, store)
    planned.stages = [replace(stage, state="cached") if stage.stage == "dataset" else stage for stage in planned.stages]
    (problem,) = check(planned, parsed.resources).problems
    assert problem.startswith(REFUSED)


@pytest.mark.parametrize(("written", "is_read"), [(HERMES, True), (LLAMA, False)], ids=["Hermes", "Llama"])
def test_a_template_whose_calls_could_not_be_read_is_refused_if_prompts_have_tools(
    written: str, is_read: bool, store: Store, rows: Path, tmp_path: Path
) -> None:
    template = calling(written)
    assert look(store, with_tools(rows, tmp_path, chat_template=template)).problems == [], "it may be in the messages"
    row = json.dumps({"prompt": "1?", "completion": "yes", "tools": SCHEMAS})
    rows.write_text(f"{row}\n" * 100)
    problems = look(store, with_tools(rows, tmp_path, chat_template=template)).problems
    begin = "rl/prompts: rl.environment: the chat template writes a call of a tool as "
    assert [problem.startswith(begin) for problem in problems] == ([] if is_read else [True])
