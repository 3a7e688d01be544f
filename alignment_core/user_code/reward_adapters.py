"""Reward functions as other libraries call them: told apart by their parameters, and called with what they ask for.

Ours take one list of dicts, under any name. TRL's take ``completions`` by keyword, beside ``prompts``, ``completion_ids`` and
columns of the data (so one that needs ``completions`` alone and takes no ``**kwargs`` is none of TRL's), and return a list of
numbers, or None for a completion that is left to the other rewards; where the data set is conversational, prompts and
completions are lists of messages. OpenRLHF's take ``queries, prompts, labels`` and return numbers, or a dict of ``rewards``
with ``scores`` and ``extra_logs``.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from alignment_core.errors import UserError
from alignment_core.user_code.functions import is_async

Rows = list[dict[str, Any]]
OPENRLHF = ("queries", "prompts", "labels")


def called_with_rows(function: Callable[..., Any], name: str, field: str) -> Callable[..., Any]:
    """The function as one of a list of dicts. Raises UserError for a class, and where the parameters do not say how it is
    called."""
    if isinstance(function, type):
        raise UserError(
            f"{field}: {name!r} is a class: name a function, or an object of it that can be called (`reward = "
            f"{function.__name__}(…)` in the file, and `:reward` here)"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not known of some that are compiled
        return function
    named = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    needed = [one.name for one in parameters if one.default is one.empty and one.name in named]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    openrlhf = all(one in named for one in OPENRLHF)
    trl = "completions" in named and (takes_all or needed != ["completions"])
    if openrlhf and trl:
        raise UserError(
            f"{field}: {name!r} could be a function for TRL or for OpenRLHF: take `completions` and no `queries` for TRL's "
            "form, `queries, prompts, labels` and no `completions` for OpenRLHF's, or one list of dicts for ours"
        )
    if openrlhf:
        return _wrapped(function, lambda rows, extra: _of_openrlhf(rows))
    if not trl:
        return function

    def of_trl(rows: Rows, extra: dict[str, Any]) -> dict[str, Any]:
        columns = {
            key: [row.get(key) for row in rows] for key in rows[0] if key not in ("prompt", "completion", "messages")
        }
        given = columns | _conversation(rows) | {"log_extra": extra.__setitem__, "log_metric": extra.__setitem__}
        lacks = [one for one in needed if one not in given]
        if "trainer_state" in lacks:
            raise TypeError("TRL's `trainer_state` is not passed here: take the parameter out, or give it a default")
        if lacks:
            raise TypeError(
                f"it needs the columns {', '.join(lacks)}, but completions have {', '.join(columns)}; "
                "`keep_columns` of the prompts keeps further ones"
            )
        return given if takes_all else {key: value for key, value in given.items() if key in named}

    return _wrapped(function, of_trl, none_is_ignored=True)


def _conversation(rows: Rows) -> dict[str, Any]:
    """Prompts and completions as TRL gives them: as messages where the first prompt was given as such."""
    if rows[0].get("messages") is None:
        return {"prompts": [row["prompt"] for row in rows], "completions": [row["completion"] for row in rows]}
    return {
        "prompts": [row["messages"] for row in rows],
        "completions": [[{"role": "assistant", "content": row["completion"]}] for row in rows],
    }


def _of_openrlhf(rows: Rows) -> dict[str, Any]:
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
    """The function as one of rows; ``keywords`` makes its arguments, which may put numbers to show into their second one."""
    if is_async(function):

        async def waits(rows: Rows) -> Any:
            extra: dict[str, Any] = {}
            answer: Awaitable[Any] = function(**keywords(rows, extra))
            return plain(await answer, extra, none_is_ignored)

        return waits

    def answers(rows: Rows) -> Any:
        extra: dict[str, Any] = {}
        answer = function(**keywords(rows, extra))
        if inspect.isawaitable(answer):
            return _later(answer, extra, none_is_ignored)
        return plain(answer, extra, none_is_ignored)

    return answers


async def _later(answer: Awaitable[Any], extra: dict[str, Any], none_is_ignored: bool) -> Any:
    return plain(await answer, extra, none_is_ignored)


def plain(answer: Any, extra: dict[str, Any], none_is_ignored: bool = False) -> Any:
    """What a function answered, without tensors, with the ``extra`` numbers that it logged, and with the meaning of None."""
    if not isinstance(answer, dict):
        rewards = _numbers(answer) if hasattr(answer, "tolist") else answer
        logged = _logged(extra, rewards)
        ignores = none_is_ignored and isinstance(rewards, list | tuple) and any(one is None for one in rewards)
        if not logged and not ignores:
            return rewards
        if isinstance(rewards, list | tuple):  # of whatever is a number, as where nothing is logged
            rewards = [None if one is None else float(one) for one in rewards]
        return {"rewards": rewards, "scores": None, "extra_logs": logged, "none_is_ignored": none_is_ignored}
    return {name: _numbers(answer.get(name)) for name in ("rewards", "scores")} | {
        "extra_logs": _shown(answer.get("extra_logs"))
    }


def _logged(extra: dict[str, Any], rewards: Any) -> dict[str, Any]:
    """The numbers of what a function logged, for all completions or for each. It may log anything else, and no completion
    loses its reward by that."""
    found = {str(name): _numbers(values) for name, values in extra.items()}
    for name, values in found.items():
        if isinstance(values, list):
            found[name] = [one if isinstance(one, int | float) else None for one in values]
    fits = {name: values for name, values in found.items() if isinstance(values, int | float | list)}
    count = len(rewards) if isinstance(rewards, list | tuple) else 0
    return {name: values for name, values in fits.items() if not isinstance(values, list) or len(values) == count}


def _shown(extra: Any) -> Any:
    return {str(name): _numbers(values) for name, values in extra.items()} if isinstance(extra, dict) else extra


def _numbers(values: Any) -> Any:
    """What an array or tensor holds, or a list of such; anything else as it is."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [_numbers(one) for one in values] if isinstance(values, list | tuple) else values
