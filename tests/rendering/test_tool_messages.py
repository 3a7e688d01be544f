"""Tools, calls of them and their results, in templates that show them."""

from __future__ import annotations

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.prompts import Prompt
from alignment_core.data.kinds.stepwise import Stepwise
from alignment_core.data.kinds.unpaired import Labelled
from alignment_core.data.messages import assistant, user
from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.families import Family
from tests.rendering.installed import INSTALLED
from tests.rendering.rows import readable, rows_of

SHOWING = ("trl-qwen2_5", "trl-qwen3_training", "trl-qwen3_instruct_2507", "trl-qwen3_vl", "trl-lfm2_v2", "trl-gptoss")
pytestmark = pytest.mark.parametrize(
    "family", [family for family in INSTALLED if family.name in SHOWING], ids=str, scope="session"
)

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer", "description": "a number"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "square", "description": "Squares.", "parameters": PARAMETERS}}]
CALL = {"type": "function", "function": {"name": "square", "arguments": {"x": 3}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "square", "content": "9"}
CHAT = [*user("3 squared?"), CALLING, RESULT, *assistant("It is nine.")]


def test_calls_and_answers_are_targets_and_results_are_not(family: Family, renderer: Renderer) -> None:
    rows = rows_of(Demonstration([], CHAT, tools=TOOLS), renderer, family)
    call, answer = (expected.last_turn(family, CHAT[: turn + 1], TOOLS) for turn in (1, 3))
    if len(rows) == 1:
        assert answer.ids[: len(call.ids)] == call.ids
        mask = [*call.mask, *answer.mask[len(call.ids) :]]
        assert readable(family, rows[0]["input_ids"]) == readable(family, answer.ids)
        assert rows[0]["loss_mask"] == mask
    else:
        assert [readable(family, row["input_ids"]) for row in rows] == [readable(family, r.ids) for r in (call, answer)]
        assert [row["loss_mask"] for row in rows] == [call.mask, answer.mask]


def test_a_pair_of_a_call_and_a_text(family: Family, renderer: Renderer) -> None:
    (row,) = rows_of(Preference(CHAT[:1], [CALLING], assistant("10"), tools=TOOLS), renderer, family)
    for name, answer in (("chosen", CALLING), ("rejected", assistant("10")[0])):
        right = expected.last_turn(family, [*CHAT[:1], answer], TOOLS)
        assert readable(family, row["prompt_ids"] + row[f"{name}_ids"]) == readable(family, right.ids)


def test_all_kinds_of_rows_show_the_tools(family: Family, renderer: Renderer) -> None:
    prompt_ids, right = expected.prompt(family, CHAT[:3], TOOLS), expected.last_turn(family, CHAT, TOOLS)
    (row,) = rows_of(Prompt(CHAT[:3], tools=TOOLS), renderer, family)
    assert readable(family, row["prompt_ids"]) == readable(family, prompt_ids)
    (row,) = rows_of(Labelled(CHAT[:3], CHAT[3:], True, tools=TOOLS), renderer, family)
    assert readable(family, row["prompt_ids"] + row["completion_ids"]) == readable(family, right.ids)
    (row,) = rows_of(Stepwise(CHAT[:3], ["Nine.", "It is nine."], [1.0, 0.0], tools=TOOLS), renderer, family)
    assert readable(family, row["prompt_ids"]) == readable(family, prompt_ids)


def test_a_tool_result_follows_the_call_as_in_the_template(family: Family, renderer: Renderer) -> None:
    prompt_ids = renderer.encode_conversation(CHAT[:1], TOOLS)
    assert prompt_ids == expected.prompt(family, CHAT[:1], TOOLS)
    call = expected.last_turn(family, CHAT[:2], TOOLS)
    context = call.ids + renderer.encode_reply([RESULT], ended_by=call.ids[-1], tools=TOOLS)
    assert readable(family, context) == readable(family, expected.prompt(family, CHAT[:3], TOOLS))
