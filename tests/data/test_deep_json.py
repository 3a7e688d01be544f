"""JSON inside texts of rows that is nested without end, or has numbers of thousands of digits: the row is bad, nothing ends."""

from __future__ import annotations

from typing import Any

import pytest

from alignment_core.data.fields import Fields
from alignment_core.data.origins.reasoning_gym import from_label
from alignment_core.environments import agents
from alignment_core.init.verifying import has_tests
from alignment_core.nights import labels
from alignment_core.rewards.verifiers.code import CodeTests

DEEP = "[" * 100_000
HUGE = f"[{'9' * 10_000}]"
"""Python refuses to convert numbers of more than 4,300 digits from text."""
CALL = {"type": "function", "function": {"name": "f", "arguments": ""}}


def a_row(text: str, where: str) -> dict[str, Any]:
    if where == "tools":
        return {"prompt": "?", "completion": "!", "tools": text}
    if where == "arguments":
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns}
    return {"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": text}]}


@pytest.mark.parametrize("text", [DEEP, HUGE])
@pytest.mark.parametrize("where", ["tools", "arguments", "sharegpt"])
def test_a_row_with_deep_or_huge_json_is_malformed(text: str, where: str) -> None:
    fields = Fields(a_row(text, where), {"messages": "conversations"} if where == "sharegpt" else {})
    with pytest.raises(ValueError, match="JSON text"):
        fields.tools() if where == "tools" else fields.messages("messages")


@pytest.mark.parametrize("text", [DEEP, HUGE])
def test_labels_and_verdicts_with_deep_or_huge_json_are_refused(text: str) -> None:
    assert not has_tests(text)
    with pytest.raises(ValueError, match="is not the label of a `reasoning_gym` row"):
        from_label(text)
    assert labels._of_line(text) == "is not JSON"
    assert "is not JSON" in str(labels._of_argilla({"id": "a", "metadata": {"prompt": text}}))
    with pytest.raises(agents.Refused, match="a tool call is malformed"):
        agents._function({"function": {"name": "f", "arguments": text}})


def test_a_label_without_tests_fails_alone() -> None:
    failed = CodeTests("evaluation.verifier")._score("print(1)", DEEP)
    assert "nested too deeply" in str(failed)
