"""The functions of a process of environments, which keeps one object for each episode and calls its methods."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from alignment_core.credentials import resolved
from alignment_core.environments.agents import Agent
from alignment_core.environments.calling import called
from alignment_core.environments.observations import contents_of, images_for
from alignment_core.errors import UserError
from alignment_core.user_code.errors import Failed, raised
from alignment_core.user_code.functions import load_function

FIELD = "rl.environment.name"
AGENT = "rl.environment.agent"
OPTIONS = "rl.environment.options"

MOST_SHOWN = 300
"""Characters of a wrong value in a message."""
WANTED_OF_STEP = "a dict with `observation` or `done: true` is needed"

_load = functools.lru_cache(maxsize=1)(load_function)

_EPISODES: dict[str, Any] = {}


async def reset(
    episode: str,
    environment: str | None,
    agent: str | None,
    options: dict[str, Any],
    prompt: str,
    label: str | None,
    images: Sequence[str] = (),
) -> Any:
    """Begin an episode; its first observation, None for none. ``images`` are the paths of the prompt's."""
    options = resolved(options, OPTIONS)
    if environment is None:
        function = _load(str(agent), AGENT)
        instance = _EPISODES[episode] = Agent(function, {**options, **images_for(function, images, options)})
        return {"observation": await called(instance.reset, prompt, label)}
    instance = _EPISODES[episode] = await called(_load(environment, FIELD), **options)
    observation = await called(instance.reset, prompt, label, **images_for(instance.reset, images))
    try:
        return {"observation": None if observation is None else await _contents(observation)}
    except TypeError as error:
        raise TypeError(f"`reset` returned {_shown(observation)}; {error}, or None") from None


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
    if not isinstance(answer, dict):
        raise TypeError(f"`step` returned {_shown(answer)}; {WANTED_OF_STEP}")
    done, observation = bool(answer.get("done", False)), answer.get("observation")
    if not (done or is_agent):
        try:
            observation = await _contents(observation)
        except TypeError as error:
            raise TypeError(f"`step` returned {_shown(answer)}; {WANTED_OF_STEP} ({error})") from None
    reward = float(answer.get("reward", 0.0))
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; a finite number is needed")
    return {
        "observation": None if done else observation,
        "reward": reward,
        "done": done,
        "verify": answer.get("verify"),
    }


async def _contents(observation: Any) -> Any:
    """An observation for the sampler; reading and encoding its images blocks no other episode."""
    return observation if isinstance(observation, str) else await called(contents_of, observation)


def _shown(value: Any) -> str:
    """A value in a message; images may have millions of characters."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


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
