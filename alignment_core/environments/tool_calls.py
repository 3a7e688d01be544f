"""Tool calls in a policy's turn: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alignment_core.data.messages import Messages, user
from alignment_core.data.turn_end import QUESTION
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from alignment_core.data.template import Renderer

TOOLS = "alignment_core.environments.tools:Tools"
"""The environment that runs calls."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHTS = {f"<{name}>": f"</{name}>" for name in ("think", "thinking", "seed:think")} | {"[THINK]": "[/THINK]"}
"""Marks around thoughts: of Qwen and DeepSeek, of Claude's imitators, of Seed-OSS and of Magistral."""
TAGS = (OPEN, CLOSE, *THOUGHTS, *THOUGHTS.values())
"""Text that is kept in a turn even if it is a special token of the tokenizer."""
_NEXT = re.compile("|".join(map(re.escape, (OPEN, *THOUGHTS))))
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """One call of a tool, or a ``problem`` if it is malformed."""

    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str = ""


_PROBE = Call("probe", {"text": "probe"})


def parse(text: str) -> tuple[str, list[Call]]:
    """The text of a turn without its calls, and the calls in order.

    Calls inside thoughts do not count. If the prompt opened a thought, the turn only closes it.
    """
    place = _end_of_opened_thought(text)
    words, calls = [text[:place]], []
    while mark := _NEXT.search(text, place):
        words.append(text[place : mark.start()])
        place = mark.end()
        if mark[0] in THOUGHTS:
            close = THOUGHTS[mark[0]]
            end = text.find(close, place)
            place = len(text) if end < 0 else end + len(close)
            words.append(text[mark.start() : place])
        elif body := _body(text, place):
            calls.append(_call(body[0]))
            place = body[1]
        else:  # words about calls
            words.append(mark[0])
    return "".join([*words, text[place:]]).strip(), calls


def check_format(renderer: Renderer, tools: list[dict[str, Any]]) -> None:
    """Raise UserError if the chat template writes calls of the ``tools`` that it shows in a format that :func:`parse` does not
    read. A template that shows no calls passes: the format is then known from the prompts alone."""
    call = {"id": call_id(1, 0), "type": "function", "function": {"name": _PROBE.name, "arguments": _PROBE.arguments}}
    calling: Messages = [*user(QUESTION), {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        text = renderer.conversation(renderer.fields.fitted(calling, tools), tools).rpartition(QUESTION)[2]
    except (UserError, ValueError):
        return
    if parse(text)[1][-1:] != [_PROBE]:
        raise UserError(
            f"rl.environment: the chat template writes a call of a tool as {text.strip()!r}, and only "
            f'{OPEN}{{"name": …, "arguments": {{…}}}}{CLOSE} is read: set model.chat_template to one that writes calls so, or '
            "describe the tools and this format in a message instead of in `tools`"
        )


def unclosed_thought(before: str, turn: str) -> str:
    """The mark of a thought that the text before a turn opens and the turn does not close; empty if there is none.

    Generation prompts of reasoning models may end with it.
    """
    opened = (mark for mark in THOUGHTS if before.rstrip().endswith(mark))
    return next((mark for mark in opened if THOUGHTS[mark] not in turn), "")


def call_id(turn: int, number: int) -> str:
    """The id of a call: nine digits, the form that Mistral's templates take; equal in equal episodes."""
    return f"{turn:05}{number:04}"


def answers(contents: Sequence[Any], calls: Sequence[Call], turn: int) -> list[dict[str, Any]]:
    """A message of the role ``tool`` for each content that answers a turn, with the id and the name of its call.

    Names are those of ``calls`` where each has its answer.
    """
    names = [call.name for call in calls] if len(calls) == len(contents) else [""] * len(contents)
    return [
        {
            "role": "tool",
            "content": content,
            "tool_call_id": call_id(turn, number),
            **({"name": name} if name else {}),
        }
        for number, (content, name) in enumerate(zip(contents, names, strict=True))
    ]


def _end_of_opened_thought(text: str) -> int:
    """Index of the turn's first words, behind a thought that is closed without having been opened."""
    ends, words = [0], _without_json(text)
    for mark, close in THOUGHTS.items():
        end = words.find(close)
        if end >= 0 and mark not in words[:end]:
            ends.append(end + len(close))
    return max(ends)


def _without_json(text: str) -> str:
    """The text with blanks in place of the JSON of calls, whose arguments may contain marks of thoughts."""
    for call in re.finditer(rf"{OPEN}\s*", text):
        with suppress(ValueError, RecursionError):
            _, end = _JSON.raw_decode(text, call.end())
            text = text[: call.end()] + " " * (end - call.end()) + text[end:]
    return text


def _body(text: str, start: int) -> tuple[str, int] | None:
    """The content of a call that is opened before ``start``, and the end of the call; None if no call follows.

    The closing tag may be missing, if the turn was truncated or another call follows; arguments may contain the tags.
    """
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        _, end = _JSON.raw_decode(text, begin)
    except (ValueError, RecursionError):
        end = start
    close, following = text.find(CLOSE, end), text.find(OPEN, end)
    if close >= 0 and not 0 <= following < close:
        return text[start:close], close + len(CLOSE)
    if text[begin : begin + 1] not in ("{", "["):
        return None
    end = len(text) if following < 0 else following
    return text[start:end], end


def _call(text: str) -> Call:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Call(problem=f"not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call(problem='not of the form {"name": …, "arguments": {…}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(problem="`arguments` is not an object")
    return Call(value["name"], arguments)
