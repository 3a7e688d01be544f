"""All that rewards the completions of one run of reinforcement learning: opened once, asked in every step, closed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from alignment_core.errors import Stopped
from alignment_core.execution.base import StageContext
from alignment_core.recipes.sections.rl import RewardConfig
from alignment_core.rewards.endpoint import Endpoint
from alignment_core.rewards.failures import Account, Answers, Failed
from alignment_core.rewards.group_function import GroupFunction
from alignment_core.rewards.judges import FORWARD, Judge, check_tokenizer
from alignment_core.rewards.verifiers import function_content, verifier_content
from alignment_core.rewards.verifying import Verifier
from alignment_core.rollout.experience import Samples

Source = Callable[[Samples], Answers]


class RewardSources:
    """Everything that ``rewards`` names; a context manager to enter while trainers or engines are held.

    Calling it with rows of completions gives one list for each source: a finite number for each row, or why there is none.
    It may be called from any thread, one call at a time is worked on, and closing it ends every process that it
    started and any call that is under way (with Stopped, but for a judge's). ``failed`` counts what had no reward, by
    reason. Raises DataError where more than a reward's ``max_failed`` of the last ``step`` rows have none.

    Args: ``prompts`` are rows whose ``prompt_ids`` and ``prompt`` the policy's ``tokenizer`` made; ``step`` is how many
    completions a step has.
    """

    def __init__(
        self,
        context: StageContext,
        rewards: Sequence[RewardConfig],
        prompts: list[dict[str, Any]],
        tokenizer: Any,
        step: int,
        trust_remote_code: bool = False,
    ) -> None:
        self._context, self._rewards, self._trust = context, rewards, trust_remote_code
        self._prompts, self._tokenizer = prompts, tokenizer
        self._calling, self._closed = threading.Lock(), False
        self._open = ExitStack()
        self._open.callback(self.stop)
        self._light_sources: list[Endpoint | Verifier | GroupFunction] = []
        self._accounts = [
            Account(_who(reward), reward.max_failed, f"{field(number)}.max_failed", step)
            for number, reward in enumerate(rewards)
        ]
        self._sources = {
            number: self._light(number) for number, reward in enumerate(rewards) if reward.reward_model is None
        }

    def __enter__(self) -> RewardSources:
        with self._open as opening:
            judges = [number for number, reward in enumerate(self._rewards) if reward.reward_model is not None]
            self._sources |= {number: self._judge(number, opening) for number in judges}
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._open.close()

    def stop(self) -> None:
        """Give no more rewards, and end the call that is under way, unless it is a judge's. From any thread."""
        self._closed = True
        for source in self._light_sources:
            source.close()

    def __call__(self, rows: Samples) -> list[list[float | Failed]]:
        with self._calling:
            if self._closed:
                raise Stopped("the rewards were closed")
            return [account.settle(rows, self._sources[number](rows)) for number, account in enumerate(self._accounts)]

    @property
    def failed(self) -> Counter[str]:
        """Rewards that were not given since this was opened, by reason."""
        counts: Counter[str] = Counter()
        for account in self._accounts:
            counts.update(account.failed)
        return counts

    def _light(self, number: int) -> Source:
        """What needs no actors, and can be missed before any are started."""
        reward, timeout = self._rewards[number], self._context.resources.reward_timeout_seconds
        if reward.environment:
            return _of_environment
        source: Endpoint | Verifier | GroupFunction
        if reward.urls:
            text = self._whole_text
            source = Endpoint(reward.urls, reward.batch_size, reward.token_variable, timeout, field(number), text)
        elif reward.function is not None:
            source = GroupFunction(reward.function, timeout, f"{field(number)}.function")
        else:
            assert reward.verifier is not None
            source = Verifier(reward.verifier, timeout, f"{field(number)}.verifier")
        self._light_sources.append(source)
        return source

    def _judge(self, number: int, opening: ExitStack) -> Source:
        from alignment_core.models.saving import checkpoint_dtype

        context, model = self._context, self._context.inputs[f"reward-{number}"]
        check_tokenizer(model, f"reward model of {field(number)}", self._prompts_as_completions(), self._trust)
        arguments = {
            "model": str(model),
            "head": "score",
            "bf16": checkpoint_dtype(model) != "float32",
            "token_budget": context.resources.max_tokens_per_microbatch,
            "device": context.machines.device,
            "trust_remote_code": self._trust,
        }
        group = opening.enter_context(context.machines.judges(f"reward-{number}", FORWARD, arguments))
        return Judge(group, context.resources.wait_timeout_seconds)

    def _prompts_as_completions(self) -> Samples:
        """Prompts as if they were completions, for a look at what tokens mean."""
        return [
            {
                "completion_ids": prompt["prompt_ids"],
                "completion_text": self._tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=True),
            }
            for prompt in self._prompts
        ]

    def _whole_text(self, row: dict[str, Any]) -> str:
        return self._tokenizer.decode([*row["prompt_ids"], *row["completion_ids"]], skip_special_tokens=False)


def _of_environment(rows: Samples) -> Answers:
    """What the rows' environments gave them, or why they failed."""
    yield from ((number, row["environment"]) for number, row in enumerate(rows))


def field(number: int) -> str:
    """Where the recipe has the reward with this number."""
    return f"rl.rewards.{number}"


def content(rewards: Sequence[RewardConfig]) -> list[dict[str, Any]]:
    """What of the rewards decides a result: functions by their source, reward models as inputs, an endpoint by its first URL.

    Further URLs are replicas that answer the same; how many completions they are asked for at a time, and by which token,
    changes no answer.
    """
    return [_content(number, reward) for number, reward in enumerate(rewards)]


def _content(number: int, reward: RewardConfig) -> dict[str, Any]:
    found = reward.model_dump(mode="json", exclude={"batch_size", "token_variable"})
    found["reward_model"] = reward.reward_model is not None  # which one is an input
    found["urls"] = reward.urls[:1]
    if reward.verifier is not None:
        found["verifier"] = verifier_content(reward.verifier, f"{field(number)}.verifier")
    if reward.function is not None:
        found["function"] = function_content(reward.function, f"{field(number)}.function")
    return found


def _who(reward: RewardConfig) -> str:
    if reward.environment:
        return "the environment"
    if reward.verifier is not None:
        return f"the verifier {reward.verifier}"
    if reward.function is not None:
        return f"the function {reward.function}"
    return f"the endpoint {reward.urls[0]}" if reward.urls else "the reward model"
