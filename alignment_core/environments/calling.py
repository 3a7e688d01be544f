"""Calls of user functions in a process that serves many episodes, so that no call blocks the others."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from alignment_core.user_code.functions import is_async


async def called(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Call a function, and await its result if that is awaitable.

    A function that is not async runs in a thread, so that a call that hangs blocks no other. The result is checked too,
    because a decorator may hide that a function is async.
    """
    if is_async(function):
        result = function(*arguments, **options)
    else:
        result = await _in_thread(function, *arguments, **options)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(settler: Callable[[Any], None], result: Any) -> None:
        if not answer.done():  # the caller may have been cancelled
            settler(result)

    def call() -> None:
        try:
            done = (answer.set_result, function(*arguments, **options))
        except BaseException as error:  # the user's code runs here
            done = (answer.set_exception, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        loop.call_soon_threadsafe(settle, *done)

    threading.Thread(target=call, daemon=True).start()
    return await answer
