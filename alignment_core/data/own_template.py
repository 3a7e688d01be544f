"""Prompts of an evaluation as a policy's own chat template renders them, whatever the template of their data set is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from alignment_core.data.messages import as_given, tools_of
from alignment_core.data.template import TODAY, Renderer
from alignment_core.data.turn_end import PROBES, QUESTION
from alignment_core.errors import UserError

Row = dict[str, Any]
FOR_ALL = "evaluation.prompts.chat_template sets one that all models get"


def in_own_template(
    rows: Sequence[Row], renderer: Renderer, some_are_cut: bool, policy: str
) -> tuple[list[Row], list[str]]:
    """The rows of a data set of prompts, rendered for ``policy``, and warnings.

    With ``some_are_cut``, those without ``messages`` may be the rest of a longer prompt. A cut prompt stays as it is, because
    its conversation is not known; and all of them do if there are conversations and the policy has no template. No prompt is
    left out, however long, because policies are compared by the prompts' numbers. Raises UserError for a prompt that the
    template refuses.
    """
    if not renderer.template and any(row["tools"] or isinstance(as_given(row), list) for row in rows):
        sentence = (
            f"{policy} has no chat template, and prompts are conversations: it gets all prompts in the chat template of the "
            f"recipe's `model`; give it a `chat_template` of its own, or {FOR_ALL}"
        )
        return list(rows), [sentence]
    rendered = [row if some_are_cut and not row["messages"] else _rendered(row, renderer, policy) for row in rows]
    warnings = []
    ending = _generation_prompt(renderer)
    if any(some_are_cut and not row["messages"] and not row["prompt"].endswith(ending) for row in rows):
        warnings.append(
            f"evaluation.prompts.overlong: prompts were cut, and {policy}, which has another chat template, gets these in that "
            f"of the recipe's `model`: raise max_length and max_prompt_length, choose `overlong: drop`, or {FOR_ALL}"
        )
    if renderer.asks_for_today and rendered != rows:
        warnings.append(f"the chat template of {policy} asks for today's date: it gets {TODAY:%Y-%m-%d}, on any day")
    return rendered, warnings


def some_are_cut(prompts: Path) -> bool:
    """Whether a data set holds shortened rows."""
    return bool(json.loads((prompts / "statistics.json").read_text(encoding="utf-8"))["shortened"])


def _rendered(row: Row, renderer: Renderer, policy: str) -> Row:
    """The row as a data set of prompts in this chat template has it."""
    given, tools = as_given(row) or row["prompt"], tools_of(row)
    try:
        ids, text = renderer.prompt(given, tools)
    except (ValueError, UserError) as error:
        raise UserError(f"{row['source']}: the prompt cannot be rendered for {policy}: {error}; {FOR_ALL}") from None
    templated = text != given
    return {
        **row,
        "prompt_ids": ids,
        "prompt": text,
        "messages": (row["messages"] or json.dumps(given, ensure_ascii=False)) if templated else None,
        "tools": row["tools"] if templated else None,
    }


def _generation_prompt(renderer: Renderer) -> str:
    """The text behind a question, with which every rendered prompt ends; empty without a template."""
    for question in PROBES:
        with suppress(ValueError):  # a template may insist on a system message
            return renderer.prompt(question)[1].rpartition(QUESTION)[2] if renderer.template else ""
    return ""
