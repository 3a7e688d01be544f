"""The functions of a process of environments, which keeps one object for each episode and calls its methods."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from alignment_core.credentials import resolved
from alignment_core.environments.agents import Agent
from alignment_core.environments.calling import called
from alignment_core.errors import UserError
from alignment_core.user_code.errors import Failed, raised
from alignment_core.user_code.functions import load_function

FIELD = "rl.environment.name"
AGENT = "rl.environment.agent"
OPTIONS = "rl.environment.options"

_load = functools.lru_cache(maxsize=1)(load_function)

_EPISODES: dict[str, Any] = {}


async def reset(
    episode: str, environment: str | None, agent: str | None, options: dict[str, Any], prompt: str, label: str | None
) -> Any:
    """Begin an episode; its first observation, None for none."""
    options = resolved(options, OPTIONS)
    if environment is not None:
        instance = await called(_load(environment, FIELD), **options)
    else:
        instance = Agent(_load(str(agent), AGENT), options)
    _EPISODES[episode] = instance
    observation = await called(instance.reset, prompt, label)
    if environment is not None and observation is not None and not _is_observation(observation):
        raise TypeError(f"`reset` returned {observation!r}; a text, a list of texts or None is needed")
    return {"observation": observation}


async def step(episode: str, turn: dict[str, Any]) -> dict[str, Any]:
    """The environment's response to the policy's turn: to its ``text``, or for an agent to the whole turn.

    With ``verify``, a dict of a ``verifier`` and a ``completion``, that verifier's score is added to the reward. It is not
    called here: this process serves many episodes, and a verifier may hang, crash, or need a main thread.
    """
    if episode not in _EPISODES:
        raise Failed("crashed", "was lost: its process ended")
    instance = _EPISODES[episode]
    is_agent = isinstance(instance, Agent)
    answer = await called(instance.step, turn if is_agent else turn["text"])
    done = isinstance(answer, dict) and bool(answer.get("done", False))
    if not isinstance(answer, dict) or not (done or is_agent or _is_observation(answer.get("observation"))):
        wanted = "a dict with `observation` (a text or a list of texts) or `done: true` is needed"
        raise TypeError(f"`step` returned {answer!r}; {wanted}")
    reward = float(answer.get("reward", 0.0))
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; a finite number is needed")
    return {"observation": answer.get("observation"), "reward": reward, "done": done, "verify": answer.get("verify")}


def _is_observation(observation: Any) -> bool:
    return isinstance(observation, str) or (
        isinstance(observation, list) and all(isinstance(text, str) for text in observation)
    )


async def close(episode: str) -> Any:
    """End an episode."""
    instance = _EPISODES.pop(episode, None)
    if hasattr(instance, "close"):
        await called(instance.close)
    return {}


def options_content(name: str, field: str, options: dict[str, Any]) -> dict[str, Any]:
    """The result of an environment's own function ``content`` for these options, for stage keys; or the ``problem``."""
    try:
        of_options = getattr(_load(name, field), "content", None)
        return {"content": of_options(**options)} if of_options else {}
    except UserError as error:
        return {"problem": str(error)}
    except TypeError as error:
        return {"problem": f"rl.environment.options: {error}"}
    except Exception as error:  # the user's code runs here
        return {"problem": f"rl.environment.options: {name}.content failed: {raised(error)}"}


async def _content(name: str, field: str, options: dict[str, Any]) -> dict[str, Any]:
    return options_content(name, field, options)


async def act(method: str, *arguments: Any) -> Any:
    """The function that the process serves: the method's answer, and the ``seconds`` that it took."""
    methods: dict[str, Callable[..., Any]] = {"reset": reset, "step": step, "close": close, "content": _content}
    began = time.monotonic()
    answer = await methods[method](*arguments)
    return {**answer, "seconds": time.monotonic() - began}
