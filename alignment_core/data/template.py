"""From examples to token ids: exactly what inference would encode, and which of it is a target."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from alignment_core.data.formats import Messages, PreferenceExample, PromptExample, SftExample
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = list[int]


@dataclass(frozen=True)
class TrainingText:
    """A text to train on. ``loss_mask`` is 1 where the token is a target; the prompt is what precedes the first."""

    input_ids: Ids
    loss_mask: Ids
    text: str
    empty: bool = False
    """An assistant turn that is to be trained says nothing."""


@dataclass(frozen=True)
class Pair:
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Prompt:
    prompt_ids: Ids
    prompt: str


class Renderer:
    """Renders examples by one chat template, ``chat_template`` or the tokenizer's own, or as plain text without any.

    Prompt and answer are encoded apart and joined, so that the prompt's ids are those of a prompt that stands alone.
    A row that cannot be rendered raises ValueError; a template or tokenizer that never could raises UserError.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token, so a model could not learn where to stop")
        self._tokenizer: Any = tokenizer
        self._template = chat_template or tokenizer.chat_template
        self._eos_id: int = tokenizer.eos_token_id
        self._eos: str = tokenizer.eos_token
        # A template writes its own beginning of sequence; plain text gets the one that the tokenizer would add.
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
        if self._template:
            self._check_template()

    def sft(self, example: SftExample) -> list[TrainingText]:
        """One sequence; or one per assistant turn, where the template shows earlier turns otherwise later on."""
        if example.prompt is None:
            text = str(example.completion)
            return [self._join("", self._bos, [(text, True)], empty=not text.strip())]
        if isinstance(example.prompt, str) and isinstance(example.completion, str):
            if not self._template:
                turn = [(example.completion, True)]
                return [self._join(example.prompt, self._plain(example.prompt), turn, not example.completion.strip())]
            prompt, completion = _user(example.prompt), _assistant(example.completion)
        else:
            prompt, completion = list(example.prompt), list(example.completion)  # type: ignore[arg-type]
        return self._conversation(prompt + completion, len(prompt))

    def preference(self, example: PreferenceExample) -> Pair:
        """Both answers to one prompt. Their ids end with EOS; their texts leave it out."""
        texts: list[str] = []
        ids: list[Ids] = []
        for answer in (example.chosen, example.rejected):
            prompt, prompt_ids, text = self._turn(example.prompt, answer)
            texts.append(self._without_eos(text))
            ids.append([*self.encode(texts[-1]), self._eos_id])
        return Pair(prompt_ids, ids[0], ids[1], prompt, texts[0], texts[1])

    def prompt(self, example: PromptExample) -> Prompt:
        """A prompt as a model is asked it, ready for the answer."""
        if isinstance(example.prompt, str) and not self._template:
            return Prompt(self._plain(example.prompt), example.prompt)
        messages = _user(example.prompt) if isinstance(example.prompt, str) else example.prompt
        text = self._render(messages, add_generation_prompt=True)
        return Prompt(self.encode(text), text)

    def asked(self, messages: Messages, tools: list[dict[str, Any]] | None) -> Ids:
        """A conversation up to the assistant's next turn, with tools as the template shows them."""
        return self.encode(self._render(messages, add_generation_prompt=True, tools=tools))

    def told(self, messages: Messages, closed: bool = True) -> Ids:
        """What follows an assistant's turn where others answer it, up to the next turn.

        The turn ended with EOS, or else with ``closed`` false, where it was cut.

        Raises UserError where the template shows a turn otherwise once another follows.
        """
        if not self._template:
            return self.encode("".join(message["content"] for message in messages))
        turn = [*_user("?"), *_assistant("!")]
        before = self._render(turn, add_generation_prompt=False)
        after = self._render([*turn, *messages], add_generation_prompt=True)
        if not after.startswith(before):
            raise UserError("the chat template shows an assistant's turn otherwise once it was answered")
        behind = before[before.rindex("!") + 1 :]
        return self.encode((behind.removeprefix(self._eos) if closed else behind) + after.removeprefix(before))

    def told_first(self, prompt: str, messages: Messages) -> Ids:
        """The ids of a rendered ``prompt`` (which waits for an answer) where others speak before it is answered.

        Raises UserError where the template shows the prompt otherwise then.
        """
        if not self._template:
            return [*self._plain(prompt), *self.encode("".join(message["content"] for message in messages))]
        before = self._render(_user("?"), add_generation_prompt=False)
        asked = self._render(_user("?"), add_generation_prompt=True)
        after = self._render([*_user("?"), *messages], add_generation_prompt=True)
        waits = asked.removeprefix(before)
        if not (asked.startswith(before) and after.startswith(before) and prompt.endswith(waits)):
            raise UserError("the chat template shows a prompt otherwise once somebody else speaks after it")
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

    def _turn(self, prompt: str | Messages, answer: str | Messages) -> tuple[str, Ids, str]:
        """Text and ids of the prompt, and the text of one answer as the template continues the prompt with it."""
        if isinstance(prompt, str) and isinstance(answer, str):
            if not self._template:
                return prompt, self._plain(prompt), answer
            prompt, answer = _user(prompt), _assistant(answer)
        before, after = self._before_and_after([*prompt, *answer], len(prompt))
        return before, self.encode(before), after.removeprefix(before)

    def _conversation(self, messages: Messages, first: int) -> list[TrainingText]:
        """Train the assistant turns from number ``first`` on."""
        turns = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        rendered = [self._before_and_after(messages, turn) for turn in turns]
        empty = [not messages[turn]["content"].strip() for turn in turns]
        # Each rendering begins with the one before: then the last one shows every turn as inference saw it.
        if all(later.startswith(earlier) for (_, earlier), (later, _) in pairwise(rendered)):
            spans, end = [], len(rendered[0][0])
            for before, after in rendered:
                spans += [(after[end : len(before)], False), (after[len(before) :], True)]
                end = len(after)
            return [self._join(rendered[0][0], self.encode(rendered[0][0]), spans, any(empty))]
        return [
            self._join(before, self.encode(before), [(after.removeprefix(before), True)], nothing)
            for (before, after), nothing in zip(rendered, empty, strict=True)
        ]

    def _before_and_after(self, messages: Messages, turn: int) -> tuple[str, str]:
        """What inference sees before assistant turn number ``turn``, and the same with the turn."""
        before = self._render(messages[:turn], add_generation_prompt=True)
        after = self._render(messages[: turn + 1], add_generation_prompt=False)
        if not after.startswith(before):
            raise ValueError(
                "the chat template renders an assistant turn otherwise than it prompts for one: the prompt ends with "
                f"{before[-40:]!r}, which the rendered turn does not go through"
            )
        return before, after

    def _join(self, prompt: str, prompt_ids: Ids, spans: list[tuple[str, bool]], empty: bool) -> TrainingText:
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

    def _plain(self, prompt: str) -> Ids:
        ids = self.encode(prompt)
        return ids if ids[: len(self._bos)] == self._bos else self._bos + ids

    def _render(self, messages: Messages, add_generation_prompt: bool, tools: list[Any] | None = None) -> str:
        from jinja2 import TemplateError

        if not self._template:
            raise UserError(
                "the rows are messages, and neither the tokenizer nor the data set has a chat template: "
                "set `chat_template` in the recipe (of the data or of the model)"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self._template if isinstance(self._template, str) else None,
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
                _user("a"), chat_template=self._template if isinstance(self._template, str) else None, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise UserError(f"chat_template: is not valid Jinja, line {error.lineno}: {error.message}") from None
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError, ValueError):
            return  # it may insist on a system message, say: the rows themselves will tell


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _assistant(text: str) -> Messages:
    return [{"role": "assistant", "content": text}]
