"""Each function of the user, called as a run calls it, on a few rows: one that never works is said before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from alignment_core.environments import calls as environment_calls
from alignment_core.environments.environments import ACT
from alignment_core.errors import UserError
from alignment_core.execution.base import SamplingPlan
from alignment_core.recipes.sections.resources import ResourcesConfig
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import EnvironmentConfig
from alignment_core.rewards.base import Opening, kind_of
from alignment_core.rewards.results import Account
from alignment_core.user_code.errors import Failed
from alignment_core.user_code.process import FunctionProcess

Rows = Sequence[dict[str, Any]]
Answers = Generator[Any, None, None]
SHOWN = 60
USUAL: float = RewardConfig.model_fields["max_failed"].default
"""Where a recipe lets more fail, a function may be meant to refuse what we make up."""


@dataclass(frozen=True)
class Called:
    """A function to call: by its name in a recipe, on the prompts of one data set."""

    field: str
    name: str
    max_failed: float
    """Share of the completions for which it may fail."""
    look: Callable[[Rows, float], Answers]
    """Calls it with so many seconds for each answer; what it answers to each row, or why it does not."""

    def problem(self, rows: Rows, timeout: float) -> str | None:
        """A sentence, if it cannot be loaded or fails on every one of ``rows``. Raises EnvironmentFault where it cannot run."""
        failed = []
        try:
            with closing(self.look(rows, timeout)) as answers:
                for row, answer in zip(rows, answers, strict=False):
                    if not isinstance(answer, Failed):
                        return None
                    prompt = f"for the prompt {row['prompt_text'][:SHOWN]!r} of {row['source']}"
                    failed.append(f"{self.field}: {self.name} {answer}, {prompt}")
        except UserError as error:
            return str(error)
        return failed[0] if failed and self.max_failed <= USUAL else None


def called_by(
    rewards: Mapping[str, RewardConfig], sampling: SamplingPlan, resources: ResourcesConfig
) -> Iterator[Called]:
    """The functions of the user's among the rewards, by their fields, of what is sampled, and those of its environment. An
    endpoint is not asked, nor is what needs actors, such as a reward model."""
    for field, reward in rewards.items():
        kind = kind_of(reward)
        for name in () if kind.actors else kind.user_code:
            look = _reward(reward, Opening(field, resources), sampling.generation.num_generations)
            yield Called(f"{field}.{name}", getattr(reward, name), reward.max_failed, look)
    environment = sampling.environment
    if environment is not None and environment.name is not None:
        most = next((reward.max_failed for reward in rewards.values() if reward.of_environment), USUAL)
        yield Called(environment_calls.FIELD, environment.name, most, _environment(environment))


def _reward(reward: RewardConfig, opening: Opening, generations: int) -> Any:
    """The rows as if they were that many completions each; of their rewards, one that is no failure if there is one."""

    def look(rows: Rows, timeout: float) -> Answers:
        account = Account(opening.field, reward.max_failed, opening.field, missing=reward.missing)
        resources = opening.resources.model_copy(update={"reward_timeout_seconds": timeout, "reward_processes": 1})
        with closing(kind_of(reward).open(reward, replace(opening, resources=resources))) as source:
            for number, row in enumerate(rows):
                group = [
                    {**row, "group": number, "prompt": number, "sample": sample, "finish_reason": "stop", "policy": ""}
                    for sample in range(generations)
                ]
                answers = [account.result(answer) for _, answer in source(group)]
                yield next((one for one in answers if not isinstance(one, Failed)), answers[0])

    return look


def _environment(config: EnvironmentConfig) -> Any:
    def look(rows: Rows, timeout: float) -> Answers:
        process = FunctionProcess(ACT, timeout, environment_calls.FIELD)
        with closing(process):
            for number, row in enumerate(rows):
                reset = ["reset", str(number), config.name, None, config.options, row["prompt_text"], row["label"]]
                for _, answer in process.answers([reset]):
                    yield answer
                for _ in process.answers([["close", str(number)]]):
                    pass

    return look
