"""Calls of a user's functions in a process that serves many episodes, so that none of them holds the others up."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MOST_THREADS = 4096
"""An agent that is no coroutine holds one for its whole episode."""


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS)


async def called(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Await it if it is a coroutine function; otherwise it has a thread, so that one that hangs holds nobody up."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **options)
    call = functools.partial(function, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)
