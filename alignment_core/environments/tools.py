"""The environment `Tools`: it runs the tool calls of a turn, returns their results, and scores the last turn."""

from __future__ import annotations

import functools
import inspect
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from alignment_core.environments import tool_calls
from alignment_core.environments.calling import called
from alignment_core.environments.tool_calls import Call
from alignment_core.errors import UserError
from alignment_core.rewards.verify import verifier_computed_by, verifier_content
from alignment_core.user_code.errors import does_not_take
from alignment_core.user_code.functions import function_content, load_function
from alignment_core.user_code.import_guard import refusal

FIELD = "rl.environment.options"
TASK = "task"
TASK_FUNCTION = "alignment_core.data.tasks:is_label"
_load = functools.cache(load_function)


class Tools:
    """Runs Python functions for the policy, for as many turns as call any; a turn without a call is the answer.

    ``tools`` are functions, each ``file.py:function`` or ``module:function``, sync or async, which are called by their name
    with the call's arguments. ``verifier``, any that a reward may name, scores the answer against the label: that turn's
    text alone. It is called where those of rewards are, in a process of its own, not here.
    """

    def __init__(self, tools: list[str], verifier: str) -> None:
        self._tools = {name: _load(function, f"{FIELD}.tools") for name, function in _by_name(tools).items()}
        for name, tool in self._tools.items():
            if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
                raise UserError(f"{FIELD}.tools: {name!r} yields its results; return a text, or what JSON can hold")
        self._verifier = _name_of(verifier)

    @staticmethod
    def content(tools: list[str], verifier: str) -> dict[str, Any]:
        """The options that decide a result, for stage keys. Raises UserError for missing functions."""
        name = _name_of(verifier)
        scorer = {**verifier_content(name, f"{FIELD}.verifier"), **verifier_computed_by(name)}
        named = _by_name(tools).values()
        return {"tools": [function_content(function, f"{FIELD}.tools") for function in named], "verifier": scorer}

    def reset(self, prompt: str, label: str | None) -> None:
        """The prompt itself says which tools there are."""

    async def step(self, completion: str) -> dict[str, Any]:
        """One message for each call: its result, or what went wrong."""
        _, calls = tool_calls.parse(completion)
        if not calls:
            return {"verify": {"verifier": self._verifier, "completion": completion}, "done": True}
        return {"observation": [await self._result(call) for call in calls]}

    async def _result(self, call: Call) -> str:
        if call.problem:
            return f"Error: the tool call is {call.problem}"
        if call.name not in self._tools:
            return f"Error: there is no tool {call.name!r}; there are {', '.join(self._tools)}"
        tool = self._tools[call.name]
        try:
            result = await called(tool, **(call.arguments or {}))
            if isinstance(result, Iterator | AsyncIterator):
                raise UserError(
                    f"{FIELD}.tools: {call.name!r} returned a {type(result).__name__}; return a text, or what JSON can hold"
                )
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # the user's code runs here
            if (refused := refusal(error)) is not None:
                raise refused from None  # for the user to mend: no other call would do better
            how = f"; it is called as {call.name}{_signature(tool)}" if does_not_take(error, "called", "call") else ""
            return f"Error: {type(error).__name__}: {error}{how}"


def _by_name(tools: list[str]) -> dict[str, str]:
    """The functions by the names by which they are called. Raises UserError for two of one name."""
    fields = defaultdict[str, list[int]](list)
    for number, function in enumerate(tools):
        fields[function.rpartition(":")[2]].append(number)
    for name, numbers in fields.items():
        if len(numbers) > 1:
            where = " and ".join(f"{FIELD}.tools[{number}] ({tools[number]})" for number in numbers)
            raise UserError(f"{where} are both called {name!r}; give each tool a name of its own")
    return {name: tools[number] for name, (number,) in fields.items()}


def _signature(tool: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(tool))
    except (TypeError, ValueError):  # not known of some that are compiled
        return "(…)"


def _name_of(verifier: str) -> str:
    """Also where prompts are not of a built-in task, `task` is whether the answer is the label."""
    return TASK_FUNCTION if verifier == TASK else verifier
