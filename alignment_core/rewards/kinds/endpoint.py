"""`urls`: an HTTP endpoint with its replicas."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.rewards.base import Opening, RewardKind
from alignment_core.rewards.endpoint import Endpoint


def _or_one_text(schema: dict[str, Any]) -> None:
    """One text stands for a list of one."""
    schema["anyOf"] = [{"type": schema.pop("type"), "items": schema.pop("items")}, {"type": "string"}]


class EndpointReward(RewardConfig):
    """Rewards from an HTTP server, or from several replicas of it."""

    KEY: ClassVar[str] = "urls"

    urls: tuple[str, ...] = Field(min_length=1, json_schema_extra=_or_one_text)
    """Replicas of one HTTP endpoint. The first URL identifies it and is part of the stage's key."""
    batch_size: int = Field(32, ge=1)
    """Completions per request."""
    token_variable: str | None = None
    """Name of the environment variable that holds the bearer token."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, urls: Any) -> Any:
        return (urls,) if isinstance(urls, str) else urls

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{url!r} is not an http:// or https:// URL")
            if parts.username or parts.password:
                raise ValueError(
                    "a URL in a recipe must not contain a password; name the environment variable of a token in "
                    "`token_variable`"
                )
        return urls


def _content(reward: EndpointReward, field: str) -> dict[str, Any]:
    """Further URLs are replicas that answer the same; how many completions they are asked for at a time, and by which token,
    changes no answer."""
    return {**reward.model_dump(mode="json", exclude={"batch_size", "token_variable"}), "urls": reward.urls[:1]}


def _open(reward: EndpointReward, opening: Opening) -> Endpoint:
    def text(row: dict[str, Any]) -> str:
        whole: str = opening.tokenizer.decode(
            [*map(int, row["prompt_ids"]), *map(int, row["completion_ids"])], skip_special_tokens=False
        )
        return whole

    timeout = opening.resources.reward_timeout_seconds
    return Endpoint(reward.urls, reward.batch_size, reward.token_variable, timeout, opening.field, text)


REWARD = RewardKind(EndpointReward, _open, who=lambda reward: f"the endpoint {reward.urls[0]}", content=_content)
