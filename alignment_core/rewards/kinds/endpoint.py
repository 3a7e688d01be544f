"""`urls`: an HTTP endpoint with its replicas."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from alignment_core.recipes.base import unkeyed
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.urls import Urls
from alignment_core.rewards.base import Opening, RewardKind
from alignment_core.rewards.endpoint import Endpoint, asks_for, read_rewards


class EndpointReward(RewardConfig):
    """Rewards from an HTTP server, or from several replicas of it."""

    KEY: ClassVar[str] = "urls"

    urls: Urls
    """Replicas of one HTTP endpoint. The first URL identifies it and is part of the stage's key. `env:NAME` stands
    for an environment variable that holds the whole URL, or the value of a parameter: `https://host/score?key=env:NAME`."""
    batch_size: int = Field(32, ge=1)
    """Completions per request."""
    max_concurrency: int = unkeyed(4, ge=1)
    """Maximum number of concurrent requests to each replica. Default: 4, lower than for a judge, because a request has
    `batch_size` completions, and most servers compute one request after the other: those that wait there must still be
    answered within `resources.reward_timeout_seconds`."""
    token_variable: str | None = None
    """Name of the environment variable that holds the bearer token."""


def _content(reward: EndpointReward, field: str) -> dict[str, Any]:
    """Further URLs are replicas with the same answers; requests of other sizes or at other times do not change them."""
    return {
        **reward.model_dump(mode="json", exclude={"batch_size", "max_concurrency", "token_variable"}),
        "urls": reward.urls[:1],
    }


def _open(reward: EndpointReward, opening: Opening) -> Endpoint:
    def text(row: dict[str, Any]) -> str:
        whole: str = opening.tokenizer.decode(
            [*map(int, row["prompt_ids"]), *map(int, row["completion_ids"])], skip_special_tokens=False
        )
        return whole

    timeout, field = opening.resources.reward_timeout_seconds, f"{opening.field}.urls"
    return Endpoint(
        reward.urls,
        reward.batch_size,
        reward.token_variable,
        timeout,
        field,
        asks_for(text),
        read_rewards,
        max_concurrency=reward.max_concurrency,
    )


REWARD = RewardKind(
    EndpointReward,
    _open,
    description=lambda reward: f"the endpoint {reward.urls[0]}",
    content=_content,
    kept=True,
)
