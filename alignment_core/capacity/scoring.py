"""The rewards of completions: reward models in actors, judges on servers, and what is not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from alignment_core.capacity import memory
from alignment_core.capacity.architecture import Architecture
from alignment_core.capacity.memory import Role
from alignment_core.capacity.seconds import Timing
from alignment_core.capacity.workload import LEARNED, SERVED, Scorer
from alignment_core.cluster.device import is_sharded
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import ENGINE_MEMORY
from alignment_core.rewards.kinds.served_judge import ServedJudge

CHARACTERS = 4
"""Characters of English text in a token, on average: the size of a judge's question around prompt and completion."""
ELSEWHERE = {
    "judge": "a judge behind an endpoint has machines of its own, and its time is not counted",
    "urls": "the time of an endpoint is not counted",
    "environment": "the time of the environment is not counted",
}
"""Kinds of rewards outside of the GPUs of a run; others are functions and verifiers."""


class RewardPlace(NamedTuple):
    """The actors of a reward model."""

    host: str
    """Whose GPUs they are on: those of a model, or of reward models alone."""
    ranks: int
    gpus: int
    """GPUs over which all actors with this host are spread."""


@dataclass(frozen=True)
class Scoring:
    """The rewards of completions."""

    roles: tuple[Role, ...]
    """Reward models, in actors of their own."""
    together: Mapping[str, tuple[Role, ...]]
    """Those of them, by host, that are on one GPU, where it has most of them."""
    served: tuple[Role, ...]
    """Judges on servers, which are on the first GPUs of a machine for as long as their stage lasts."""
    seconds: float
    notes: tuple[str, ...]
    """Sentences about what is not counted."""
    problems: tuple[str, ...]


def scoring(
    scorers: Sequence[Scorer],
    models: Sequence[Architecture],
    tokens: float,
    sizes: tuple[int, int, int],
    resources: ResourcesConfig,
    timing: Timing,
    places: Sequence[RewardPlace],
) -> Scoring:
    """The rewards of so many ``tokens``; ``models`` are those of the ``scorers``, and ``sizes`` the number of completions and
    the tokens of a prompt and of a completion. ``places``: the actors of each reward model. Those with different hosts compute
    at the same time."""
    _, prompt, completion = sizes
    roles: list[Role] = []
    served: list[Role] = []
    notes: list[str] = []
    problems: list[str] = []
    seconds = 0.0
    by_host: dict[str, list[tuple[Role, RewardPlace, bool]]] = {}
    of_host: dict[str, float] = {}
    budget = max(resources.token_budget, prompt + completion)
    for scorer, model in zip(scorers, models, strict=True):
        of_model = replace(timing, model=model)
        if scorer.kind in LEARNED:
            number, place = len(roles), places[len(roles)]
            is_split = is_sharded(resources.of_model("reward", number), place.ranks)
            offload = resources.models.of_reward(number).offload_parameters
            roles.append(memory.frozen(scorer.kind, model, place.ranks, is_split, offload, budget))
            by_host.setdefault(place.host, []).append((roles[-1], place, is_split))
            taken = of_model.forward(tokens, (prompt + completion) / 2, place.ranks, is_split, budget)
            of_host[place.host] = of_host.get(place.host, 0.0) + taken
        elif scorer.kind == SERVED:
            judge, taken, problem = _judge(scorer, model, sizes, resources, of_model)
            served.append(judge)
            seconds += taken
            problems += [problem] if problem else []
        else:
            notes.append(f"{scorer.field}: {ELSEWHERE.get(scorer.kind, 'the time of functions is not counted')}")
    seconds += max(of_host.values(), default=0.0)
    together = {host: _together(models) for host, models in by_host.items()}
    return Scoring(tuple(roles), together, tuple(served), seconds, tuple(notes), tuple(problems))


def _together(models: Sequence[tuple[Role, RewardPlace, bool]]) -> tuple[Role, ...]:
    """Of the reward models of a host, each with whether it is split, those on one GPU: all that are split and, of others in
    several actors each, the largest of those that are not on another GPU."""
    split = [role for role, _, is_split in models if is_split]
    whole = [(role, place.ranks, place.gpus) for role, place, is_split in models if not is_split]
    most = max((-(-sum(ranks for _, ranks, _ in whole) // gpus) for _, _, gpus in whole), default=0)
    return (*split, *sorted((role for role, _, _ in whole), key=lambda role: -role.resident)[:most])


def _judge(
    scorer: Scorer, model: Architecture, sizes: tuple[int, int, int], resources: ResourcesConfig, timing: Timing
) -> tuple[Role, float, str | None]:
    """The memory of a judge's server on each of its GPUs, the seconds of its answers, and why it does not fit."""
    completions, prompt, completion = sizes
    reward = scorer.reward
    assert isinstance(reward, ServedJudge)
    shards = resources.tensor_parallel_size
    utilization = resources.gpu_memory_utilization or ENGINE_MEMORY[0]
    role = memory.engine(model, timing.hardware, shards, utilization, shards, name=scorer.kind)
    question = len(reward.template) // CHARACTERS + prompt + completion
    answer = 1 if reward.verdicts is not None else reward.max_tokens
    longest = (question + answer) * model.cache / shards
    fitting = int(role.terms["cache"] // longest) if timing.hardware.memory else reward.max_concurrency
    problem = None
    if fitting < 1:
        needed, given = role.terms["weights"] + role.terms["reserve"] + longest, utilization * timing.hardware.memory
        problem = (
            f"{scorer.field}: the server of the judge needs {needed / 1e9:.1f} GB on each of its {shards} GPUs for weights and "
            f"one answer, and gpu_memory_utilization {utilization:g} gives it {given / 1e9:.1f} GB"
        )
    at_once = max(1, min(fitting, reward.max_concurrency))
    return role, timing.sampling(completions, question, completions, answer, 1, shards, at_once), problem
