"""Calls of a user's functions in a process that serves many episodes, so that none of them holds the others up."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def called(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Await it if it is a coroutine function; otherwise it has a thread, so that one that hangs holds nobody up."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **options)
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
