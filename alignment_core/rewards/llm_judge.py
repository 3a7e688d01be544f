"""A language model as judge, behind an OpenAI-compatible endpoint: its requests, and how its verdicts are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.data.image_reader import data_url
from alignment_core.data.images import images_in_messages, mark, marks_in
from alignment_core.data.messages import as_given, in_words, tools_of
from alignment_core.recipes.sections.pairwise_judge import JudgeSampling
from alignment_core.user_code.errors import Failed

if TYPE_CHECKING:
    import httpx

TOP_LOGPS = 20
"""Number of most likely first tokens to request; the maximum of OpenAI's interface."""
LEAST_MASS = 0.01
"""Least probability of all verdicts together as the first token. Below it, the judge was about to write something else, and the
proportions of what is left say nothing."""
END_OF_REASONING = "</think>"
"""Ends the reasoning in the text of a server that does not separate it, as vLLM's without a reasoning parser."""
SHOWN = 80
"""Characters of an answer that a message shows."""


def conversation(row: Mapping[str, Any]) -> str:
    """The prompt of a completion for a judge: the text before the policy's template; of several messages each with its speaker,
    and the tools. Images have stand-ins, for :func:`with_images`."""
    given = as_given(row)
    return str(row["prompt_text"]) if given is None else in_words(given, tools_of(row), mark)


def images_of_prompt(row: Mapping[str, Any]) -> tuple[Path, ...]:
    """The images of a completion's prompt without those of observations, which are no part of the question to a judge; all of
    the row where the prompt's messages are not known."""
    images = tuple(row.get("images") or ())
    if (given := as_given(row)) is None:
        return images
    by_digest = {image.name: image for image in images}
    return tuple(by_digest[digest] for digest in images_in_messages(given) if digest in by_digest)


def with_images(question: str, images: Sequence[Path]) -> str | list[dict[str, Any]]:
    """A question as the content of a message: with images in the places of their stand-ins, or before a question that has none,
    in OpenAI's form. ``images`` are files named by their digests."""
    if not images:
        return question
    by_digest = {image.name: image for image in images}
    places = [match for match in marks_in(question) if match[1] in by_digest]
    parts: list[dict[str, Any]] = [] if places else [_part(image) for image in images]
    end = 0
    for place in places:
        if before := question[end : place.start()]:
            parts.append({"type": "text", "text": before})
        parts.append(_part(by_digest[place[1]]))
        end = place.end()
    return [*parts, *([{"type": "text", "text": question[end:]}] if question[end:] else [])]


def _part(image: Path) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def filled(template: str, values: Mapping[str, str | None]) -> str:
    """The template with each ``{name}`` of ``values`` in it replaced; other braces stay. Raises Failed for one that is None."""

    def value(field: re.Match[str]) -> str:
        if (text := values[field[1]]) is None:
            raise Failed("none_given", f"needs the prompt's {field[1]}, and it has none")
        return text

    return re.sub(rf"\{{({'|'.join(values)})\}}", value, template)


def request(
    model: str,
    question: str | list[dict[str, Any]],
    sampling: JudgeSampling,
    with_logps: bool,
    stop_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """The JSON of a chat completion; greedy, unless ``sampling`` says otherwise. ``stop_ids`` are for a server of vLLM's."""
    content: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        sampling.max_tokens_field: 1 if with_logps else sampling.max_tokens,
    }
    if sampling.temperature is not None:
        content["temperature"] = sampling.temperature
    if stop_ids:
        content["stop_token_ids"] = list(stop_ids)
    return content | ({"logprobs": True, "top_logprobs": TOP_LOGPS} if with_logps else {})


def choice_of(response: httpx.Response) -> dict[str, Any]:
    """The judge's choice in a response. Raises Failed if that is no chat completion."""
    choice = None
    with suppress(ValueError, RecursionError, KeyError, IndexError, TypeError):
        choice = response.json()["choices"][0]
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise Failed("wrong_shape", "did not answer with a chat completion")
    return choice


def answer_of(choice: Mapping[str, Any]) -> str:
    """The text of the judge's answer, without the reasoning before it. Raises Failed if there is none, and if it was cut off: a
    verdict that it considers on the way is not the one at its end."""
    text = choice["message"].get("content")
    if choice.get("finish_reason") == "length":
        before = "its answer ended" if isinstance(text, str) else "it wrote an answer"
        raise Failed("wrong_shape", f"was cut off before {before}: raise max_tokens")
    if not isinstance(text, str):
        raise Failed("wrong_shape", "did not answer with a text")
    return text.rpartition(END_OF_REASONING)[2]


def text_in(text: str, pattern: str) -> str:
    """The first group of the last match of ``pattern``. Raises Failed if there is none."""
    verdicts = [match[1] for match in re.finditer(pattern, text) if match[1]]
    if not verdicts:
        raise Failed("wrong_shape", f"gave no verdict that {pattern!r} finds: {text[-SHOWN:]!r}")
    return str(verdicts[-1])


def number_in(text: str, pattern: str) -> float:
    """The same as a number. Raises Failed if there is none."""
    verdict = text_in(text, pattern)
    try:
        return float(verdict)
    except ValueError:
        raise Failed("bad_number", f"gave {verdict[:SHOWN]!r} where {pattern!r} should find a number") from None


def expected(choice: Mapping[str, Any], values: Mapping[str, float]) -> float:
    """The mean of ``values`` by the probabilities of their verdicts as the first token, as in Liu et al. 2023, "G-Eval".

    A verdict may begin with a space. Raises Failed if they have less than ``LEAST_MASS`` among the likeliest tokens that the
    endpoint returns.
    """
    tops: Sequence[Mapping[str, Any]] = ()
    with suppress(KeyError, IndexError, TypeError):
        tops = choice["logprobs"]["content"][0]["top_logprobs"]
    if not tops:
        raise Failed("wrong_shape", "gave no verdict: its answer has no log-probabilities")
    chances = dict.fromkeys(values, 0.0)
    for top in tops:
        if (verdict := str(top["token"]).strip()) in chances:
            chances[verdict] += math.exp(float(top["logprob"]))
    total = math.fsum(chances.values())
    if total < LEAST_MASS:
        likeliest = max(tops, key=lambda top: float(top["logprob"]))["token"]
        raise Failed(
            "wrong_shape",
            f"gave no verdict: {', '.join(values)} have a probability of {total:.1g} as its first token, which is most likely "
            f"{likeliest!r}; a model that reasons first needs `score` in place of `verdicts`, or no reasoning (Qwen3: "
            "`chat_template_kwargs: {enable_thinking: false}` of its model)",
        )
    return math.fsum(chance * values[verdict] for verdict, chance in chances.items()) / total


def reads(read: Callable[[dict[str, Any]], float]) -> Callable[[httpx.Response, int], list[Any]]:
    """Reads an endpoint's answer about one completion."""

    def verdict(response: httpx.Response, _count: int) -> list[Any]:
        return [read(choice_of(response))]

    return verdict
