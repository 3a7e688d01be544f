"""Data that one model reads in several chat templates: it would be trained in one and sampled in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checks.recipes import look, rl, sft

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("training", "prompts", "warned"),
    [
        (TEMPLATE, None, ["sft/data"]),
        (None, TEMPLATE, ["evaluation/prompts"]),
        (TEMPLATE, TEMPLATE, []),
        (None, None, []),
    ],
)
def test_data_sets_of_one_model_in_several_templates_are_named(
    store: Any, rows: Path, training: str | None, prompts: str | None, warned: list[str]
) -> None:
    recipe = sft(rows, chat_template=training)
    prompt_source = {"path": str(rows), "columns": {"label": "completion"}, "chat_template": prompts}
    generation = {"max_completion_length": 8}
    recipe["evaluation"] = {"prompts": prompt_source, "generation": generation, "verifier": "math", "max_overlap": 1.0}
    report = look(store, recipe)
    assert report.problems == []
    warnings_of = {answer.label: answer.warnings for answer in report.seen}
    assert [
        label
        for label, warnings in warnings_of.items()
        if any("`chat_template` is not" in warning for warning in warnings)
    ] == warned


@pytest.mark.parametrize("is_agent", [True, False])
def test_prompts_of_an_agent_may_be_rendered_otherwise(is_agent: bool, store: Any, rows: Path, tmp_path: Path) -> None:
    """The policy reads the messages of the agent, which the template of the model renders."""
    (tmp_path / "agents.py").write_text("def solve(prompt, label, base_url, api_key):\n    return 1.0\n")
    recipe = rl(rows, {"environment": True} if is_agent else {"verifier": "math"})
    recipe["rl"]["prompts"]["chat_template"] = "{{ messages[-1]['content'] }}"
    if is_agent:
        recipe["rl"]["environment"] = {"agent": f"{tmp_path / 'agents.py'}:solve"}
    prompts = {"path": str(rows), "columns": {"label": "completion"}}
    generation = {"max_completion_length": 8}
    recipe["evaluation"] = {"prompts": prompts, "generation": generation, "verifier": "math", "max_overlap": 1.0}
    report = look(store, recipe)
    assert report.problems == []
    warnings = {answer.label: answer.warnings for answer in report.seen}
    warned = [label for label, of_label in warnings.items() if any("`chat_template` is not" in w for w in of_label)]
    assert warned == ([] if is_agent else ["rl/prompts"])
