"""Sampling parameters of language models that judge."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from alignment_core.recipes.base import Config, unkeyed


class JudgeSampling(Config):
    """Length and temperature of a judge's answer."""

    max_tokens: int = Field(512, ge=1)
    """Maximum length of the judge's answer in tokens, including the reasoning of reasoning models."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = unkeyed("max_tokens")
    """Field of the request that carries `max_tokens`: OpenAI's reasoning models (o series, GPT-5) take only
    `max_completion_tokens`."""
    temperature: float | None = unkeyed(0.0, ge=0)
    """Sampling temperature of the judge; 0 is greedy. `null` omits it from the request, for endpoints that reject it."""
