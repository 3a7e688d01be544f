"""The end of an assistant turn: the token with which the chat template closes it, and the tokens at which sampling stops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from alignment_core.data.messages import Messages, assistant, user

QUESTION, ANSWER = "probe question", "probe answer"
"""Contents of the conversation that is rendered to find how a template closes an assistant turn."""
TEMPLATE = "chat_template.jinja"
PLAIN = "plain"
"""The value of ``chat_template`` that stands for none, even if the tokenizer has one."""
PROBES: tuple[Messages, ...] = (user(QUESTION), [{"role": "system", "content": "probe"}, *user(QUESTION)])
"""Prompts of this conversation: some templates insist on a system message."""


@dataclass(frozen=True)
class TurnEnd:
    """The end of an assistant turn.

    ``text`` is the template's text behind the answer, up to and including the special token that closes the turn:
    ``"<|im_end|>"`` of ChatML, ``" </s>"`` of Llama 2. It is empty without a template, and if the template closes a turn
    with no special token; then the turn ends with EOS directly behind the answer.
    """

    token_id: int
    """The last token of a turn: the last of ``text``, or EOS."""
    text: str
    tail: str
    """The whole text of the template behind an answer: ``text`` and, for example, a newline, which no model writes."""
    stop_ids: tuple[int, ...]
    """Tokens at which sampling stops: ``token_id``, EOS and those of the model's generation_config.json, ascending."""
    space_before: str = ""
    """White space that the template writes between the generation prompt and an answer, as Llama 2's does."""
    space_behind: str = ""
    """White space that the template writes between an answer and the token that ends its turn."""


class ClosingTokens:
    """The tokens of a tokenizer that may close a turn, as they are spelled: special ones, or else any added one."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        """Without tokens that ``encode`` does not read as one, without BOS, which begins what follows, and without white space,
        such as the line breaks that Gemma's tokenizers list as added tokens."""
        added = [(number, token) for number, token in tokenizer.added_tokens_decoder.items() if not _is_space(token)]
        ids = {token.content: number for number, token in added} | {tokenizer.eos_token: tokenizer.eos_token_id}
        if tokenizer.bos_token != tokenizer.eos_token:
            ids.pop(tokenizer.bos_token, None)
        self.ids = {token: number for token, number in ids.items() if encode(token) == [number]}
        ordinary = {token.content for _, token in added if not token.special} - {tokenizer.eos_token}
        self.special = self.ids.keys() - ordinary
        self._patterns = [_any_of(self.special), _any_of(self.ids)]

    def runs(self, text: str) -> list[str]:
        """A text up to the first closing token, and up to each one directly behind it; empty without any."""
        for pattern in self._patterns:
            if match := re.search(f"({pattern})+", text):
                tokens = re.findall(pattern, match.group())
                return list(accumulate(tokens, initial=text[: match.start()]))[1:]
        return []

    def last(self, text: str) -> str:
        """The special token at the end of a text; empty if there is none."""
        return max((token for token in self.special if text.endswith(token)), key=len, default="")


def _is_space(token: Any) -> bool:
    """Whether an added token is white space alone, which SentencePiece writes as ▁."""
    content: str = token.content.replace("▁", " ")
    return content.isspace()


def _any_of(tokens: Iterable[str]) -> str:
    """A pattern that matches the longest of the tokens."""
    return "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"


def turn_end(
    render: Callable[[Messages, bool], str] | None, tokenizer: Any, closing: ClosingTokens, eos_token_ids: Iterable[int]
) -> TurnEnd:
    """The end of turns that ``render`` renders (a conversation, with or without a generation prompt; None: no template).

    ``eos_token_ids`` are those of the model's generation_config.json.
    """
    lead, tail, middle = _around_answer(render) if render else ("", "", "")
    runs = closing.runs(tail)
    # At the end of a conversation, some templates write another token (gpt-oss), and some an additional one (Phi-4-mini).
    text = next((run for run in reversed(runs) if middle.startswith(run)), runs[-1] if runs else "")
    token = max((token for token in closing.ids if text.endswith(token)), key=len, default=tokenizer.eos_token)
    token_id: int = closing.ids.get(token, tokenizer.eos_token_id)
    stop_ids = tuple(sorted({token_id, tokenizer.eos_token_id, *eos_token_ids}))
    return TurnEnd(token_id, text, tail, stop_ids, _space(lead), _space(text[: len(text) - len(text.lstrip())]))


def _space(text: str) -> str:
    return text if text.isspace() else ""


def _around_answer(render: Callable[[Messages, bool], str]) -> tuple[str, str, str]:
    """Text of the template between generation prompt and answer, behind an answer at the end of a conversation, and behind one
    that another message follows; each is empty if the template renders no such conversation."""

    def around(*messages: dict[str, Any]) -> tuple[str, str]:
        for question in PROBES:
            with suppress(ValueError):
                prompt = render(question, True)
                before, answer, behind = render([*question, *assistant(ANSWER), *messages], False).partition(ANSWER)
                if answer:
                    return before.removeprefix(prompt) if before.startswith(prompt) else "", behind
        return "", ""

    return *around(), around(*user(QUESTION))[1]


def keep_chat_template(chat_template: str, prompts: Path) -> None:
    """Write the chat template that data was rendered with, if it is not the tokenizer's own, to the folder of the data."""
    (prompts / TEMPLATE).write_text(chat_template, encoding="utf-8")


def pass_chat_template_on(source: Path, target: Path) -> None:
    """Copy the chat template that :func:`keep_chat_template` wrote to ``source`` into ``target``, data derived from it."""
    if (chat_template := chat_template_of(source)) is not None:
        keep_chat_template(chat_template, target)


def chat_template_of(prompts: Path) -> str | None:
    """The chat template that :func:`keep_chat_template` wrote; None if the tokenizer's own was used."""
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
