"""`judge`: a language model behind an OpenAI-compatible endpoint that scores completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from alignment_core.credentials import with_path
from alignment_core.recipes.sections.pairwise_judge import JudgeSampling, with_group
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.urls import Urls
from alignment_core.rewards.base import Opening, RewardKind, Rows
from alignment_core.rewards.endpoint import Endpoint
from alignment_core.rewards.llm_judge import (
    answer_of,
    conversation,
    expected,
    filled,
    images_of_prompt,
    number_in,
    reads,
    request,
    with_images,
)
from alignment_core.user_code.errors import Failed

RUBRIC = """Rate how well the answer serves the question: is it right, complete, clear and harmless? The question:

{prompt}

The answer:

{completion}

Say in one or two sentences what is good and what is bad, then end with a line "Score: N", where N is a number from \
1 (useless) to 10 (perfect)."""


class Judged(RewardConfig, JudgeSampling):
    """How a language model is asked what it thinks of a completion, and how its answer is read."""

    may_return_none: ClassVar[bool] = False

    template: str = RUBRIC
    """The question to the judge, with `{prompt}`, `{completion}` and, where prompts have one, `{label}`."""
    score: str = r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression of the score in the judge's answer: the first group of the last match."""
    verdicts: dict[str, float] | None = None
    """Instead of a score: words of one token and what each is worth, such as `{"Yes": 1, "No": 0}`. The reward is their mean by
    the probabilities that the judge gives them as its first token."""
    scale: tuple[float, float] | None = (1, 10)
    """The lowest and the highest score, which become 0 and 1; null takes scores as they are."""

    @field_validator("verdicts", mode="before")
    @classmethod
    def _are_words(cls, verdicts: Any) -> Any:
        if isinstance(verdicts, dict) and any(isinstance(word, bool) for word in verdicts):
            raise ValueError('YAML takes Yes and No without quotes for true and false: write {"Yes": 1, "No": 0}')
        return verdicts

    @field_validator("template")
    @classmethod
    def _shows_the_completion(cls, template: str) -> str:
        if "{completion}" not in template:
            raise ValueError("a judge has to see the answer: the template needs {completion}")
        return template

    @field_validator("score")
    @classmethod
    def _has_a_group(cls, score: str) -> str:
        return with_group(score, "the number")

    @model_validator(mode="after")
    def _reads_in_one_way(self, info: ValidationInfo) -> Judged:
        if self.verdicts is not None:
            if len(self.verdicts) < 2:
                raise ValueError("`verdicts` needs at least two words")
            self.refuse_unused(
                info, ("score", "scale", "max_tokens"), "because `verdicts` are read as the judge's first token"
            )
        if self.scale and self.scale[0] >= self.scale[1]:
            raise ValueError("`scale` needs the lowest and then the highest score")
        return self

    def value(self, choice: dict[str, Any]) -> float:
        """The reward of a judge's answer. Raises Failed."""
        if self.verdicts is not None:
            return expected(choice, self.verdicts)
        score = number_in(answer_of(choice), self.score)
        if self.scale is None:
            return score
        low, high = self.scale
        if not low <= score <= high:
            raise Failed("bad_number", f"gave {score:g}, which is not on the scale from {low:g} to {high:g}")
        return (score - low) / (high - low)


class JudgeReward(Judged):
    """What a language model behind an endpoint thinks of a completion."""

    KEY: ClassVar[str] = "judge"

    judge: Urls
    """Base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`, or of several replicas. The first one
    is part of the stage's key."""
    judge_model: str = Field(min_length=1)
    """The model's name, as the server knows it."""
    token_variable: str | None = None
    """Name of the environment variable that holds the bearer token."""


def asking(
    reward: Judged,
    opening: Opening,
    field: str,
    urls: Sequence[str],
    model: str,
    token_variable: str | None = None,
    token: str | None = None,
    stop_ids: Sequence[int] = (),
) -> Endpoint:
    """The judge called ``model`` behind these base URLs; ``field`` is the reward's field for it."""

    def asks(rows: Rows) -> dict[str, Any]:
        (row,) = rows
        values = {"prompt": conversation(row), "completion": row["completion_text"], "label": row["label"]}
        question = with_images(filled(reward.template, values), images_of_prompt(row))
        return request(model, question, reward, reward.verdicts is not None, stop_ids)

    places = [with_path(url, "chat/completions") for url in urls]
    timeout = opening.resources.reward_timeout_seconds
    where, read = f"{opening.field}.{field}", reads(reward.value)
    return Endpoint(places, 1, token_variable, timeout, where, asks, read, token, reward.max_concurrency)


def _content(reward: JudgeReward, field: str) -> dict[str, Any]:
    """Further URLs are replicas with the same answers; neither the token nor the number of requests changes an answer."""
    return {**reward.model_dump(mode="json", exclude={"token_variable", "max_concurrency"}), "judge": reward.judge[:1]}


def _open(reward: JudgeReward, opening: Opening) -> Endpoint:
    return asking(reward, opening, reward.KEY, reward.judge, reward.judge_model, reward.token_variable)


REWARD = RewardKind(
    JudgeReward,
    _open,
    description=lambda reward: f"the judge {reward.judge_model}",
    content=_content,
    code=lambda reward: ("alignment_core.rewards.llm_judge",),
    kept=True,
)
