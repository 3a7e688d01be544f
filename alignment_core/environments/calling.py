"""Calls of a user's functions in a process that serves many episodes, so that none of them holds the others up."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from alignment_core.user_code.functions import is_async


async def called(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Call a function and await what it returns, if that can be awaited.

    One that is not async runs in a thread, so that others do not wait where it hangs. Whether the result can be awaited is
    known only then: a decorator may hide that a function is async.
    """
    if is_async(function):
        result = function(*arguments, **options)
    else:
        result = await _in_thread(function, *arguments, **options)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def tell(tell_it: Callable[[Any], None], what: Any) -> None:
        if not answer.done():  # whoever waited may have given up
            tell_it(what)

    def call() -> None:
        try:
            done = (answer.set_result, function(*arguments, **options))
        except BaseException as error:  # the user's code runs here
            done = (answer.set_exception, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        loop.call_soon_threadsafe(tell, *done)

    threading.Thread(target=call, daemon=True).start()
    return await answer
