"""Adapters for reward functions of TRL and OpenRLHF, which are recognised by their parameters.

Ours take one list of dicts, under any name. TRL's take ``completions`` by keyword, with ``prompts``, ``completion_ids`` and
columns of the data (so a function of ``completions`` alone without ``**kwargs`` is not one of TRL's), and return a list of
numbers, or None for a completion that is left to the other rewards; if the data set is conversational, prompts and completions
are lists of messages. OpenRLHF's take ``queries, prompts, labels`` and return numbers, or a dict of ``rewards`` with ``scores``
and ``extra_logs``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from alignment_core.errors import UserError

Rows = list[dict[str, Any]]
OPENRLHF = ("queries", "prompts", "labels")


def called_with_rows(function: Callable[..., Any], name: str, field: str) -> Callable[..., Any]:
    """The function as one of a list of dicts. Raises UserError for a class, and for parameters of both libraries."""
    if isinstance(function, type):
        raise UserError(
            f"{field}: {name!r} is a class: name a function, or an object of it that can be called (`reward = "
            f"{function.__name__}(…)` in the file, and `:reward` here)"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # unknown for some compiled functions
        return function
    named = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each.name for each in parameters if each.default is each.empty and each.name in named]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    openrlhf = set(OPENRLHF) <= set(named)
    trl = "completions" in named and (takes_all or needed != ["completions"])
    if openrlhf and trl:
        raise UserError(
            f"{field}: {name!r} could be a function for TRL or for OpenRLHF: take `completions` and no `queries` for TRL's "
            "form, `queries, prompts, labels` and no `completions` for OpenRLHF's, or one list of dicts for ours"
        )
    if openrlhf:
        return _wrapped(function, lambda rows, extra: _openrlhf_arguments(rows))
    if not trl:
        return function

    def trl_arguments(rows: Rows, extra: dict[str, Any]) -> dict[str, Any]:
        columns = {
            key: [row.get(key) for row in rows] for key in rows[0] if key not in ("prompt", "completion", "messages")
        }
        arguments = columns | _conversation(rows) | {"log_extra": extra.__setitem__, "log_metric": extra.__setitem__}
        missing = [name for name in needed if name not in arguments]
        if "trainer_state" in missing:
            raise TypeError("TRL's `trainer_state` is not passed here: take the parameter out, or give it a default")
        if missing:
            raise TypeError(
                f"it needs the columns {', '.join(missing)}, but completions have {', '.join(columns)}; "
                "`keep_columns` of the prompts keeps further ones"
            )
        return arguments if takes_all else {name: value for name, value in arguments.items() if name in named}

    return _wrapped(function, trl_arguments, none_is_ignored=True)


def _conversation(rows: Rows) -> dict[str, Any]:
    """Prompts and completions as TRL passes them: as messages if the first prompt has messages."""
    if rows[0].get("messages") is None:
        return {"prompts": [row["prompt"] for row in rows], "completions": [row["completion"] for row in rows]}
    return {
        "prompts": [row["messages"] for row in rows],
        "completions": [[{"role": "assistant", "content": row["completion"]}] for row in rows],
    }


def _openrlhf_arguments(rows: Rows) -> dict[str, Any]:
    return {
        "queries": [row["prompt"] + row["completion"] for row in rows],
        "prompts": [row["prompt"] for row in rows],
        "labels": [row["label"] for row in rows],
    }


def _wrapped(
    function: Callable[..., Any],
    keywords: Callable[[Rows, dict[str, Any]], dict[str, Any]],
    none_is_ignored: bool = False,
) -> Callable[..., Any]:
    """The function as one of rows; ``keywords`` makes its arguments, which log numbers into its second parameter. The result of
    a coroutine function is to be awaited."""

    def answers(rows: Rows) -> Any:
        extra: dict[str, Any] = {}
        answer = function(**keywords(rows, extra))
        if inspect.isawaitable(answer):
            return _plain_later(answer, extra, none_is_ignored)
        return plain(answer, extra, none_is_ignored)

    return answers


async def _plain_later(answer: Awaitable[Any], extra: dict[str, Any], none_is_ignored: bool) -> Any:
    return plain(await answer, extra, none_is_ignored)


def plain(answer: Any, extra: dict[str, Any], none_is_ignored: bool = False) -> Any:
    """A function's answer without tensors, with the ``extra`` numbers that it logged, and with the meaning of None."""
    if not isinstance(answer, dict):
        rewards = _numbers(answer) if hasattr(answer, "tolist") else answer
        logged = _logged(extra, rewards)
        ignores = none_is_ignored and isinstance(rewards, list | tuple) and any(reward is None for reward in rewards)
        if not logged and not ignores:
            return rewards
        if isinstance(rewards, list | tuple):  # of any numbers, as without logged ones
            rewards = [None if reward is None else float(reward) for reward in rewards]
        return {"rewards": rewards, "scores": None, "extra_logs": logged, "none_is_ignored": none_is_ignored}
    return {name: _numbers(answer.get(name)) for name in ("rewards", "scores")} | {
        "extra_logs": _shown(answer.get("extra_logs"))
    }


def _logged(extra: dict[str, Any], rewards: Any) -> dict[str, Any]:
    """The numbers that a function logged, for all completions or for each; anything else that it logged is dropped, so that no
    completion loses its reward."""
    count = len(rewards) if isinstance(rewards, list | tuple) else 0
    logged: dict[str, Any] = {}
    for name, values in extra.items():
        values = _numbers(values)
        if isinstance(values, int | float):
            logged[str(name)] = values
        elif isinstance(values, list) and len(values) == count:
            logged[str(name)] = [value if isinstance(value, int | float) else None for value in values]
    return logged


def _shown(extra: Any) -> Any:
    return {str(name): _numbers(values) for name, values in extra.items()} if isinstance(extra, dict) else extra


def _numbers(values: Any) -> Any:
    """The numbers of an array, a tensor or a list of these; any other value is unchanged."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [_numbers(value) for value in values] if isinstance(values, list | tuple) else values
