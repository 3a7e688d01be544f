"""Prompts of an evaluation as a policy's own chat template renders them, whatever the template of their data set is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from alignment_core.data.images import shown
from alignment_core.data.messages import as_given, tools_of
from alignment_core.data.statistics import not_read
from alignment_core.data.template import TODAY, Renderer
from alignment_core.data.turn_end import PROBES, QUESTION
from alignment_core.errors import UserError

Row = dict[str, Any]
FOR_ALL = "set evaluation.prompts.chat_template, which all models get"


def in_own_template(
    rows: Sequence[Row], renderer: Renderer, some_are_truncated: bool, policy_name: str
) -> tuple[list[Row], list[str]]:
    """The rows of a data set of prompts, rendered for the policy, and warnings.

    With ``some_are_truncated``, those without ``messages`` may be the rest of a longer prompt. A truncated prompt stays as it
    is, because its conversation is not known; and all of them do if there are conversations and the policy has no template. No
    prompt is left out, however long, because policies are compared by the prompts' numbers. Raises UserError for a prompt that
    the template refuses.
    """
    if not renderer.template and any(row.get("tools") or isinstance(as_given(row), list) for row in rows):
        sentence = (
            f"{policy_name} has no chat template, and prompts are conversations: it gets all prompts in the chat template of "
            f"the recipe's `model`; name its folder with a `chat_template`, or {FOR_ALL}"
        )
        return list(rows), [sentence]
    rendered, truncated = [], []
    for row in rows:
        if some_are_truncated and not row.get("messages"):
            truncated.append(row)
            rendered.append(row)
        else:
            rendered.append(_rendered(row, renderer, policy_name))
    ending = _generation_prompt(renderer)
    if rendered == rows and all(row["prompt"].endswith(ending) for row in truncated):
        return rendered, []
    return rendered, list(_warnings(rows, renderer, bool(truncated), policy_name))


def _warnings(rows: Sequence[Row], renderer: Renderer, some_are_truncated: bool, policy_name: str) -> Iterator[str]:
    """Of prompts that a policy gets otherwise than their data set has them."""
    if not renderer.template and any(row.get("messages") for row in rows):
        yield (
            f"{policy_name} has no chat template and gets plain text, unlike the recipe's `model`; if it was trained on data "
            f"with a `chat_template`, name its folder with this one, or {FOR_ALL}"
        )
    if some_are_truncated:
        yield (
            f"evaluation.prompts.overlong: truncated prompts stay in the chat template of the recipe's `model`, and "
            f"{policy_name} has another one: raise max_length and max_prompt_length, choose `overlong: drop`, or {FOR_ALL}"
        )
    yield from (f"{policy_name}: {sentence}" for sentence in not_read(renderer.fields.unread))
    if renderer.asks_for_today:
        yield f"the chat template of {policy_name} asks for today's date: it gets {TODAY:%Y-%m-%d}, on any day"


def has_truncated_rows(prompts: Path) -> bool:
    """Whether rows of a data set were shortened; False for a folder that another stage than `dataset` made."""
    statistics = prompts / "statistics.json"
    return statistics.is_file() and bool(json.loads(statistics.read_text(encoding="utf-8")).get("shortened"))


def _rendered(row: Row, renderer: Renderer, policy_name: str) -> Row:
    """The row as a data set of prompts in this chat template has it."""
    given, tools = as_given(row) or row["prompt"], tools_of(row)
    try:
        ids, text = renderer.prompt(given, tools)
    except (ValueError, UserError) as error:
        raise UserError(
            f"{row.get('source')}: the prompt cannot be rendered for {policy_name}: {error}; {FOR_ALL}"
        ) from None
    text, templated = shown(text), text != given
    messages = (row.get("messages") or json.dumps(given, ensure_ascii=False)) if templated else None
    return {
        **row,
        "prompt_ids": ids,
        "prompt": text,
        "messages": messages,
        "tools": row.get("tools") if templated else None,
    }


def _generation_prompt(renderer: Renderer) -> str:
    """The text behind a question, with which every rendered prompt ends; empty without a template."""
    for question in PROBES:
        with suppress(ValueError):  # a template may insist on a system message
            return renderer.prompt(question)[1].rpartition(QUESTION)[2] if renderer.template else ""
    return ""
