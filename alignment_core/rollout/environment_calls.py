"""What the process of environments does when it is asked: it keeps one object for each episode, and calls its methods."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from alignment_core.evaluation.function_process import AT_A_TIME
from alignment_core.evaluation.verifiers import load_function

FIELD = "rl.environment.name"

_EPISODES: dict[str, Any] = {}


async def reset(episode: str, environment: str, options: dict[str, Any], prompt: str, label: str | None) -> Any:
    """Begin an episode; what the policy is told beside its prompt, None for nothing."""
    _EPISODES[episode] = await called(_factory(environment), **options)
    observation = await called(_EPISODES[episode].reset, prompt, label)
    if observation is not None and not _is_said(observation):
        raise TypeError(f"`reset` answered {observation!r}; a text, a list of texts or None is needed")
    return {"observation": observation}


async def step(episode: str, completion: str) -> dict[str, Any]:
    """What the environment makes of the policy's turn."""
    if episode not in _EPISODES:
        raise LookupError("its process was ended by another episode")
    answer = await called(_EPISODES[episode].step, completion)
    done = isinstance(answer, dict) and bool(answer.get("done", False))
    if not isinstance(answer, dict) or not (done or _is_said(answer.get("observation"))):
        wanted = "a dict with `observation` (a text or a list of texts) or `done: true` is needed"
        raise TypeError(f"`step` answered {answer!r}; {wanted}")
    reward = float(answer.get("reward", 0.0))
    if not math.isfinite(reward):
        raise ValueError(f"`step` answered the reward {reward}; a finite number is needed")
    return {"observation": answer.get("observation"), "reward": reward, "done": done}


def _is_said(observation: Any) -> bool:
    return isinstance(observation, str) or (
        isinstance(observation, list) and all(isinstance(one, str) for one in observation)
    )


async def close(episode: str) -> Any:
    """Let go of an episode."""
    one = _EPISODES.pop(episode, None)
    if hasattr(one, "close"):
        await called(one.close)
    return {}


async def act(method: str, *arguments: Any) -> Any:
    """The one function that the process serves."""
    methods: dict[str, Callable[..., Any]] = {"reset": reset, "step": step, "close": close}
    return await methods[method](*arguments)


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(4 * AT_A_TIME)


_factory = functools.lru_cache(maxsize=1)(functools.partial(load_function, field=FIELD))


async def called(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Await it if it is a coroutine function; otherwise it has a thread, so that one that hangs holds nobody up."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **options)
    call = functools.partial(function, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)
