"""Environments of the library `verifiers` as an agent: its code runs and rewards the episode in a process of environments."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

from alignment_core.data.origins import verifiers as tasksets
from alignment_core.data.origins.verifiers import loaders, problem
from alignment_core.errors import UserError

FIELD = "rl.environment.options"
HARNESS = "alignment_chat"
KEY_VARIABLE = "ALIGNMENT_POLICY_API_KEY"
"""Variable from which `verifiers` reads the endpoint's token; it passes no variable with API_KEY in its name to programs."""


async def rollout(prompt: str, label: str | None, base_url: str, api_key: str, **options: Any) -> float:
    """One episode of the task whose number is the label, counted from 0; its reward.

    ``options`` are the environment's configuration as `verifiers` has it: ``taskset`` (its ``id``, and its own options), the
    ``id`` of an environment other than the taskset's, and one entry for each seat (``agent`` where there is but one).
    Raises ValueError for a label without a task, RuntimeError for an episode that failed.
    """
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    environment = _environment(options)
    task = _task(environment.taskset, label)
    os.environ[KEY_VARIABLE] = api_key
    policy = ModelContext(model="policy", client=EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE))
    async with environment.serving():
        episode = await environment.run_episode(task, policy)
    if not episode.ok:
        failed = [error for trace in episode.traces if not trace.ok for error in trace.errors]
        error = [*failed, *episode.errors][0]
        raise RuntimeError(f"{error.type}: {error.message}")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    if len(rewards) != 1:
        raise RuntimeError(f"{len(rewards)} conversations with the policy; an episode must be one")
    return rewards[0]


def content(**options: Any) -> dict[str, Any]:
    """The content of stage keys that depends on the options, beside the options themselves. Raises UserError for wrong ones."""
    taskset = options.get("taskset")
    if not isinstance(taskset, dict) or not isinstance(taskset.get("id"), str):
        raise UserError(f"{FIELD}.taskset: an object with the `id` of a taskset of verifiers is needed")
    taskset_content = tasksets.content(taskset["id"], options.get("id", ""), f"{FIELD}.taskset")
    try:
        _environment(options)
    except Exception as error:  # an installed package's code runs here
        raise problem(FIELD, taskset["id"], error) from None
    return taskset_content


rollout.content = content  # type: ignore[attr-defined]


def _environment(options: dict[str, Any]) -> Any:
    """Of `verifiers`. A seat without a harness or a runtime of its own chats in this process, and its tools are local."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.runtimes import PrimeConfig, SubprocessConfig

    from alignment_core.environments import verifiers_harness

    sys.modules[HARNESS] = verifiers_harness  # a harness is found as a module of the first level
    library = loaders(FIELD)
    config, seats = library.resolve_env_config(copy.deepcopy(options)), {}  # it fills in defaults
    own_harness = library.default_harness_id(config.taskset.id) == config.taskset.id
    for name, seat in agent_config_fields(config).items():
        chosen: dict[str, Any] = {}
        if seat.harness is None and not own_harness:
            chosen["harness"] = HarnessConfig(id=HARNESS)
        if isinstance(seat.runtime, PrimeConfig) and "runtime" not in options.get(name, {}):
            chosen["runtime"] = SubprocessConfig()
        seats[name] = seat.model_copy(update=chosen)
    return library.load_environment(config.model_copy(update=seats))


_TASKS: tuple[Any, Iterator[Any], list[Any]] | None = None
"""The tasks so far of the one taskset that a process of environments has, by their numbers, and the rest of them."""


def _task(taskset: Any, label: str | None) -> Any:
    global _TASKS
    if _TASKS is None or _TASKS[0] != taskset.config:
        _TASKS = taskset.config, iter(taskset), []
    _, rest, tasks = _TASKS
    number = int(label) if label is not None and label.isdecimal() else -1
    while len(tasks) <= number and (task := next(rest, None)) is not None:
        tasks.append(task)
    if not 0 <= number < len(tasks):
        raise ValueError(
            f"the label {label!r} is not the number of a task of {taskset.config.id!r} (numbers start at 0)"
        )
    return tasks[number]
