"""What the process of environments does when it is asked: it keeps one object for each episode, and calls its methods."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

from alignment_core.evaluation.verifiers import load_function

FIELD = "rl.environment.name"

_EPISODES: dict[str, Any] = {}


async def reset(episode: str, environment: str, options: dict[str, Any], prompt: str, label: str | None) -> Any:
    """Begin an episode; what the policy is told beside its prompt, None for nothing."""
    _EPISODES[episode] = await _called(_factory(environment), **options)
    observation = await _called(_EPISODES[episode].reset, prompt, label)
    if not isinstance(observation, str | None):
        raise TypeError(f"`reset` answered {observation!r}; a text or None is needed")
    return {"observation": observation}


async def step(episode: str, completion: str) -> dict[str, Any]:
    """What the environment makes of the policy's turn."""
    if episode not in _EPISODES:
        raise LookupError("its process was ended by another episode")
    answer = await _called(_EPISODES[episode].step, completion)
    done = isinstance(answer, dict) and bool(answer.get("done", False))
    if not isinstance(answer, dict) or not (done or isinstance(answer.get("observation"), str)):
        raise TypeError(f"`step` answered {answer!r}; a dict with `observation` (a text) or `done: true` is needed")
    reward = float(answer.get("reward", 0.0))
    if not math.isfinite(reward):
        raise ValueError(f"`step` answered the reward {reward}; a finite number is needed")
    return {"observation": answer.get("observation"), "reward": reward, "done": done}


async def close(episode: str) -> Any:
    """Let go of an episode."""
    one = _EPISODES.pop(episode, None)
    if hasattr(one, "close"):
        await _called(one.close)
    return {}


async def act(method: str, *arguments: Any) -> Any:
    """The one function that the process serves."""
    methods: dict[str, Callable[..., Any]] = {"reset": reset, "step": step, "close": close}
    return await methods[method](*arguments)


_factory = functools.lru_cache(maxsize=1)(functools.partial(load_function, field=FIELD))


async def _called(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
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
