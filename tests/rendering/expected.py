"""The right token ids, by plain ``transformers``."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from tests.rendering.families import Family

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Ids = list[int]


class Row(NamedTuple):
    """A conversation up to the token that ends its last assistant turn, and which of its tokens are targets."""

    ids: Ids
    mask: Ids

    @property
    def turns(self) -> list[Ids]:
        """The targets, turn by turn."""
        return [self.ids[begin:end] for begin, end in runs(self.mask)]


def runs(mask: Ids) -> list[tuple[int, int]]:
    """Where ones begin and end."""
    edges = [place for place in range(len(mask) + 1) if ([*mask, 0])[place] != ([0, *mask])[place]]
    return list(zip(edges[::2], edges[1::2], strict=True))


DAY = datetime(2024, 7, 26)
"""Today in templates that ask for it (gpt-oss), here and in all data: rows are the same on any day."""


def text(family: Family, messages: Messages, add_generation_prompt: bool = False) -> str:
    """A conversation by ``apply_chat_template``, as text."""
    return str(
        family.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, strftime_now=DAY.strftime
        )
    )


def encoded(family: Family, messages: Messages, add_generation_prompt: bool = False, tools: Tools = None) -> Ids:
    """A conversation by ``apply_chat_template``."""
    encoding = family.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=True,
        strftime_now=DAY.strftime,
    )
    return list(encoding["input_ids"])


def prompt(family: Family, messages: Messages, tools: Tools = None) -> Ids:
    """A prompt by ``apply_chat_template``."""
    return encoded(family, messages, add_generation_prompt=True, tools=tools)


def common(first: Ids, second: Ids) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(first), len(second)))


def last_turn(family: Family, messages: Messages, tools: Tools = None) -> Row:
    """A conversation of which only the last turn is trained.

    As in TRL the targets begin where the ids of the prompt and of the whole part. They end with the token that ends the turn: a
    model cannot write the template's text after that. If the template writes no such token, it is EOS.
    """
    ids = encoded(family, messages, tools=tools)
    begin = common(prompt(family, messages[:-1], tools), ids)
    if family.end is None:
        ids.append(family.tokenizer.eos_token_id)
    else:
        ends = family.ids(family.end, *family.stops)  # a call of gpt-oss ends with a special token
        ids = ids[: max(place for place, token in enumerate(ids) if token in ends) + 1]
    return Row(ids, [0] * begin + [1] * (len(ids) - begin))


def conversation(family: Family, messages: Messages) -> Row:
    """A conversation of which all assistant turns are trained, for templates that keep history as it was."""
    whole = rows(family, messages)[-1]
    for row in rows(family, messages):
        (begin, end), *_ = runs(row.mask)
        if family.end is None and row.ids[end - 1] != whole.ids[end - 1]:
            end -= 1  # EOS, which stands behind the last turn alone
        assert row.ids[:end] == whole.ids[:end], "the oracle itself: this template keeps history"
        whole.mask[begin:end] = row.mask[begin:end]
    return whole


def marked(family: Family, messages: Messages) -> Row:
    """A conversation by ``return_assistant_tokens_mask`` of ``apply_chat_template``, which reads the marks ``generation``."""
    encoding = family.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(encoding["input_ids"]), list(encoding["assistant_masks"])
    _, end = runs(mask)[-1]
    return Row(ids[:end], mask[:end])


def rows(family: Family, messages: Messages) -> list[Row]:
    """A row for each assistant turn, as inference saw it."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return [last_turn(family, messages[: turn + 1]) for turn in turns]
