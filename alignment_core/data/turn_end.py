"""How an assistant turn of a model ends: the token that the chat template closes it with, and where sampling stops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment_core.data.messages import Messages, assistant, user

QUESTION, ANSWER = "probe question", "probe answer"
"""Of the conversation that is rendered to see how a template closes an assistant turn."""
TEMPLATE = "chat_template.jinja"
_CONVERSATIONS: tuple[Messages, ...] = (
    [*user(QUESTION), *assistant(ANSWER)],
    [{"role": "system", "content": "probe"}, *user(QUESTION), *assistant(ANSWER)],
)
"""Some templates insist on a system message."""


@dataclass(frozen=True)
class TurnEnd:
    """The end of an assistant turn.

    ``text`` is what the template writes behind the answer, up to and including the special token that closes the turn:
    ``"<|im_end|>"`` of ChatML, ``" </s>"`` of Llama 2. It is empty without a template, and where a template closes a turn with
    no special token; then the turn ends with EOS directly behind the answer.
    """

    token_id: int
    """The last token of a turn: the last of ``text``, or EOS."""
    text: str
    tail: str
    """All that the template writes behind an answer: ``text`` and, for example, a newline, which no model writes."""
    stop_ids: tuple[int, ...]
    """Tokens at which sampling stops: ``token_id``, EOS and those of the model's generation_config.json, ascending."""


class SpecialTokens:
    """The special tokens of a tokenizer as they are spelled, of which one may close a turn."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        """Without those that ``encode`` does not read as one token, and without BOS, which begins what follows."""
        added = tokenizer.added_tokens_decoder.items()
        ids = {token.content: number for number, token in added if token.special}
        ids[tokenizer.eos_token] = tokenizer.eos_token_id
        if tokenizer.bos_token != tokenizer.eos_token:
            ids.pop(tokenizer.bos_token, None)
        self.ids = {token: number for token, number in ids.items() if encode(token) == [number]}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._one = "|".join(map(re.escape, longest_first)) or "(?!)"

    def up_to_first(self, text: str, run: bool = False) -> str:
        """A text up to the first of them, or with ``run`` to the last of those that follow it directly; empty without any."""
        match = re.search(f"({self._one})+" if run else self._one, text)
        return text[: match.end()] if match else ""

    def last(self, text: str) -> str:
        """The one that a text ends with; empty if there is none."""
        return max((token for token in self.ids if text.endswith(token)), key=len, default="")


def turn_end(
    render: Callable[[Messages], str] | None, tokenizer: Any, special: SpecialTokens, eos_token_ids: Iterable[int]
) -> TurnEnd:
    """How turns end that ``render`` renders (a conversation without generation prompt; None: no template).

    ``eos_token_ids`` are those of the model's generation_config.json.
    """
    tail = _tail(render) if render else ""
    text = special.up_to_first(tail, run=True)
    token_id: int = special.ids[special.last(text)] if text else tokenizer.eos_token_id
    return TurnEnd(token_id, text, tail, tuple(sorted({token_id, tokenizer.eos_token_id, *eos_token_ids})))


def _tail(render: Callable[[Messages], str]) -> str:
    """What a template writes behind an answer at the end of a conversation; empty if it renders none of ours."""
    for messages in _CONVERSATIONS:
        try:
            text = render(messages)
        except ValueError:
            continue
        if ANSWER in text:
            return text[text.rindex(ANSWER) + len(ANSWER) :]
    return ""


def keep_chat_template(chat_template: str, prompts: Path) -> None:
    """Leave the chat template that prompts are rendered with, instead of the tokenizer's own, in the folder of a data set."""
    (prompts / TEMPLATE).write_text(chat_template, encoding="utf-8")


def chat_template_of(prompts: Path) -> str | None:
    """What :func:`keep_chat_template` left: None where the tokenizer's own was used."""
    path = prompts / TEMPLATE
    return path.read_text(encoding="utf-8") if path.is_file() else None


def eos_token_ids(model: Path) -> tuple[int, ...]:
    """All ids of ``eos_token_id`` in a model folder's generation_config.json, or else its config.json, as ``generate`` takes
    them."""
    for name in ("generation_config.json", "config.json"):
        try:
            ids = json.loads((model / name).read_text()).get("eos_token_id")
        except (OSError, ValueError):
            continue
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
