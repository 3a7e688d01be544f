"""From examples to token ids: exactly what inference would encode, and which of it is a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from alignment_core.data.messages import Messages, as_messages, assistant, user
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]
Tools = list[dict[str, Any]]
"""JSON schemas of functions."""


@dataclass(frozen=True)
class TrainingText:
    """A text to train on. ``loss_mask`` is 1 where the token is a target; the prompt is what precedes the first."""

    input_ids: Ids
    loss_mask: Ids
    text: str
    empty: bool = False
    """An assistant turn that is to be trained says nothing."""


class Answered(NamedTuple):
    """A prompt with an answer to it."""

    prompt_ids: Ids
    prompt: str
    ids: Ids
    """They end with EOS."""
    text: str
    """Without EOS."""


class Renderer:
    """Renders examples by one chat template, ``chat_template`` or the tokenizer's own, or as plain text without any.

    Prompt and answer are encoded apart and joined, so that the prompt's ids are those of a prompt that stands alone.
    A row that cannot be rendered raises ValueError; a template or tokenizer that never could raises UserError.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token, so a model could not learn where to stop")
        self._tokenizer: Any = tokenizer
        self.template = chat_template or tokenizer.chat_template
        self._eos_id: int = tokenizer.eos_token_id
        self._eos: str = tokenizer.eos_token
        # A template writes its own beginning of sequence; plain text gets the one that the tokenizer would add.
        bos = tokenizer.bos_token_id
        self.bos = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
        self._shows_tools: bool | None = None  # nobody has asked yet
        if self.template:
            self._check_template()

    def answered(self, prompt: str | Messages, answer: str | Messages, tools: Tools | None = None) -> Answered:
        """A prompt and an answer to it, as the template continues the prompt with it."""
        before, prompt_ids, after = self._turn(prompt, answer, tools)
        text = self._without_eos(after)
        return Answered(prompt_ids, before, [*self.encode(text), self._eos_id], text)

    def prompt(self, prompt: str | Messages) -> tuple[Ids, str]:
        """Ids and text of a prompt as a model is asked it, ready for the answer."""
        if isinstance(prompt, str) and not self.template:
            return self.plain(prompt), prompt
        text = self._render(as_messages(prompt, "user"), add_generation_prompt=True)
        return self.encode(text), text

    def asked(self, messages: Messages, tools: list[dict[str, Any]] | None) -> Ids:
        """A conversation up to the assistant's next turn, with tools as the template shows them."""
        return self.encode(self._render(messages, add_generation_prompt=True, tools=tools))

    def told(self, messages: Messages, closed: bool = True) -> Ids:
        """What follows an assistant's turn where others answer it, up to the next turn.

        The turn ended with EOS, or with ``closed`` false, where it was truncated.

        Raises UserError if the template renders a turn differently once another follows.
        """
        if not self.template:
            return self.encode("".join(message["content"] for message in messages))
        turn = [*user("?"), *assistant("!")]
        before = self._render(turn, add_generation_prompt=False)
        after = self._render([*turn, *messages], add_generation_prompt=True)
        if not after.startswith(before):
            raise UserError("the chat template renders an assistant turn differently once a reply follows")
        behind = before[before.rindex("!") + 1 :]
        return self.encode((behind.removeprefix(self._eos) if closed else behind) + after.removeprefix(before))

    def told_first(self, prompt: str, messages: Messages) -> Ids:
        """The ids of a rendered ``prompt`` (which waits for an answer) where others speak before it is answered.

        Raises UserError where the template shows the prompt otherwise then.
        """
        if not self.template:
            return [*self.plain(prompt), *self.encode("".join(message["content"] for message in messages))]
        before = self._render(user("?"), add_generation_prompt=False)
        asked = self._render(user("?"), add_generation_prompt=True)
        after = self._render([*user("?"), *messages], add_generation_prompt=True)
        waits = asked.removeprefix(before)
        if not (asked.startswith(before) and after.startswith(before) and prompt.endswith(waits)):
            raise UserError("the chat template renders a prompt differently once another message follows")
        return self.encode(prompt.removesuffix(waits) + after.removeprefix(before))

    def encode(self, text: str) -> Ids:
        """Ids of a text, without anything that the tokenizer would add around it."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)  # five times as fast as the call around it
        if backend is not None:
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Ids) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _turn(self, prompt: str | Messages, answer: str | Messages, tools: Tools | None) -> tuple[str, Ids, str]:
        """Text and ids of the prompt, and the text of one answer as the template continues the prompt with it."""
        if isinstance(prompt, str) and isinstance(answer, str):
            if not self.template and not tools:
                return prompt, self.plain(prompt), answer
            prompt, answer = user(prompt), assistant(answer)
        before, after = self.around([*prompt, *answer], len(prompt), tools)
        return before, self.encode(before), after.removeprefix(before)

    def around(self, messages: Messages, turn: int, tools: Tools | None = None) -> tuple[str, str]:
        """What inference sees before assistant turn number ``turn``, and the same with the turn."""
        if tools:
            self._check_tools(messages[:turn], tools)
        before = self._render(messages[:turn], add_generation_prompt=True, tools=tools)
        after = self._render(messages[: turn + 1], add_generation_prompt=False, tools=tools)
        if not after.startswith(before):
            raise ValueError(
                "the chat template renders an assistant turn differently from its generation prompt: the rendered "
                f"turn does not begin with the prompt, which ends with {before[-40:]!r}"
            )
        return before, after

    def join(self, prompt: str, prompt_ids: Ids, spans: list[tuple[str, bool]], empty: bool) -> TrainingText:
        """Concatenate a prompt and spans of (text, is it a target); the last span is one, and ends with EOS."""
        ids, mask, text = list(prompt_ids), [0] * len(prompt_ids), prompt
        for number, (span, target) in enumerate(spans, start=1):
            if number == len(spans):
                span = self._without_eos(span) + self._eos
            span_ids = self.encode(span)
            if number == len(spans) and span_ids[-1:] != [self._eos_id]:  # the tokenizer does not parse its own EOS
                span_ids = [*self.encode(span.removesuffix(self._eos)), self._eos_id]
            ids += span_ids
            mask += self._targets(span_ids) if target else [0] * len(span_ids)
            text += span
        return TrainingText(ids, mask, text, empty)

    def _targets(self, ids: Ids) -> Ids:
        """All of a turn up to its last EOS: what a template puts behind that (a newline), no model ever writes."""
        behind = ids[::-1].index(self._eos_id) if self._eos_id in ids else 0
        return [1] * (len(ids) - behind) + [0] * behind

    def _without_eos(self, text: str) -> str:
        """A rendered turn without the EOS that the template may have put at its end."""
        return text.rstrip().removesuffix(self._eos) if text.rstrip().endswith(self._eos) else text

    def plain(self, prompt: str) -> Ids:
        ids = self.encode(prompt)
        return ids if ids[: len(self.bos)] == self.bos else self.bos + ids

    def _check_tools(self, messages: Messages, tools: Tools) -> None:
        """Raise UserError for a template that leaves tools out, which a model would then be trained to call unseen."""
        if self._shows_tools is None:
            with_tools, without = (self._render(messages, True, given) for given in (tools, None))
            self._shows_tools = with_tools != without
        if not self._shows_tools:
            raise UserError(
                "the rows have `tools`, which the chat template does not show: set `chat_template` to one that does"
            )

    def _render(self, messages: Messages, add_generation_prompt: bool, tools: Tools | None = None) -> str:
        from jinja2 import TemplateError

        if not self.template:
            raise UserError(
                "the rows are messages, and neither the tokenizer nor the data set has a chat template: "
                "set `chat_template` in the recipe (of the data or of the model)"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.template if isinstance(self.template, str) else None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None

    def _check_template(self) -> None:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            self._tokenizer.apply_chat_template(
                user("a"), chat_template=self.template if isinstance(self.template, str) else None, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise UserError(f"chat_template: is not valid Jinja, line {error.lineno}: {error.message}") from None
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError, ValueError):
            return  # it may insist on a system message, say: the rows themselves will tell
