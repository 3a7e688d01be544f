"""From examples to token ids, exactly as inference encodes them, with a mask of the targets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from alignment_core.data.images import images_in_messages, is_image
from alignment_core.data.message_fields import ShownFields
from alignment_core.data.messages import Messages, answered_calls, as_messages, assistant, user
from alignment_core.data.turn_end import ANSWER, PLAIN, PROBES, QUESTION, ClosingTokens, turn_end
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from alignment_core.data.image_tokens import Encode, ImageTokens

Ids = list[int]
Tools = list[dict[str, Any]]
"""JSON schemas of functions."""
TODAY = datetime(2024, 7, 26)
"""The date that chat templates get for today (`strftime_now`), so that equal recipes and rows give equal data on any day: the
default date of Llama 3.1's template."""


@dataclass(frozen=True)
class TrainingText:
    """A text to train on. ``loss_mask`` is 1 for targets; the prompt is the part before the first target."""

    input_ids: Ids
    loss_mask: Ids
    text: str
    empty: bool = False
    """Whether an assistant turn that would be trained has no content."""


class Answered(NamedTuple):
    """A prompt with an answer to it."""

    prompt_ids: Ids
    prompt: str
    ids: Ids
    """Ids of the answer, up to the token that ends an assistant turn."""
    text: str
    """Text of the answer, without the end of the turn."""


class Renderer:
    """Renders examples by one chat template, ``chat_template`` or the tokenizer's own, or as plain text without any or with
    :data:`PLAIN`.

    Text is encoded as a whole, and its ids are cut where its parts meet: a part that is encoded alone may get other ids, such
    as a SentencePiece tokenizer's space before it. A row that cannot be rendered raises ValueError; a template or tokenizer
    that never could raises UserError.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        images: Callable[[Encode], ImageTokens] | None = None,
    ) -> None:
        """``eos_token_ids`` are those of the model's generation_config.json, needed to sample. ``images`` is what
        :func:`alignment_core.data.image_tokens.tokens_of_images` gives; None for text alone. Rendered texts have stand-ins for
        images, and their ids the images' tokens."""
        if not isinstance(tokenizer.added_tokens_decoder, dict):
            raise UserError(
                f"the tokenizer is a {type(tokenizer).__name__} of another library, which renders no chat template: put the "
                "tokenizer.json and tokenizer_config.json of the model into its folder"
            )
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token, so a model could not learn where to stop")
        self._tokenizer: Any = tokenizer
        template = chat_template or tokenizer.chat_template
        self.template = None if template == PLAIN else template
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        """The tokenizer of the library `tokenizers`: encodes five times as fast as the call around it."""
        # A template writes its own beginning of sequence; plain text gets the one that the tokenizer would add.
        bos = tokenizer.bos_token_id
        self.bos = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
        self.asks_for_today = "strftime_now" in str(self.template)
        self._eos_id: int = tokenizer.eos_token_id
        self._eos: str = tokenizer.eos_token
        self.images = images(self.encode) if images else None
        self._in_parts = False
        self.fields = ShownFields(self._render)
        self._closing = ClosingTokens(tokenizer, self.encode)
        self._rstrip = {number for number, token in tokenizer.added_tokens_decoder.items() if token.rstrip}
        """Tokens that include the white space behind them, which may be part of an answer."""
        if self.template:
            self._check_template()
            self._in_parts = self._shows_parts_alone()
        self.turn_end = turn_end(self._render if self.template else None, tokenizer, self._closing, eos_token_ids)

    def answered(
        self,
        prompt: str | Messages,
        answer: str | Messages,
        tools: Tools | None = None,
        closed: bool = True,
        whole: bool = True,
        with_tail: bool = False,
    ) -> Answered:
        """A prompt and an answer, rendered as one conversation.

        The prompt's ids are those of the prompt alone, up to the first one that the answer changes. A truncated answer is not
        ``closed``: the end of the turn is left out. ``with_tail`` keeps the template's text behind the end of the turn. Raises
        ValueError if the template leaves out a part of an answer that has to be ``whole``.
        """
        before, after = self._turn(prompt, answer, tools, whole)
        text, end = self.split_end(after)
        if with_tail:
            end = after.removeprefix(text)
        encode = self.encode if self.template else self.plain
        alone, ids = encode(before), encode(before + text + (end if closed else ""))
        if closed and not end and not (with_tail and self.template):
            ids.append(self._eos_id)
        cut = common_prefix(alone, ids)
        return Answered(ids[:cut], before, ids[cut:], text)

    def closed(self, text: str, with_tail: bool = False) -> Ids:
        """Ids of a rendered conversation whose last turn ends as the template ends it.

        The end takes the place of another special or stop token, which ended the turn of another policy. ``with_tail`` adds the
        template's text behind it.
        """
        content, end = self.split_end(text)
        if content == text:
            content = self._without_stop_token(text)
        own = self.turn_end
        if not end or not own.text.endswith(end):
            end = own.text
        if with_tail and self.template:
            return self.encode(content + end + own.tail.removeprefix(own.text))
        ids = self.encode(content + end)
        return ids if end else [*ids, self._eos_id]

    def tail_ids(self) -> Ids:
        """Ids of the template's whole text behind an answer without the space that policies write; EOS without a template."""
        if not self.template:
            return [self._eos_id]
        return self._encode_behind(ANSWER, self.turn_end.tail.removeprefix(self.turn_end.space_behind))

    def _without_stop_token(self, text: str) -> str:
        ended = text.rstrip()
        stops = [token for token, number in self._closing.ids.items() if number in self.turn_end.stop_ids]
        token = max((token for token in (*self._closing.special, *stops) if ended.endswith(token)), key=len, default="")
        return ended.removesuffix(token) if token else text

    def prompt(self, prompt: str | Messages, tools: Tools | None = None) -> tuple[Ids, str]:
        """Ids and text of a prompt with its generation prompt, with tools as the template shows them."""
        check_unanswered(prompt)
        if isinstance(prompt, str) and not self.template and not tools:
            return self.plain(prompt), prompt
        messages = self.fields.fitted(as_messages(prompt, "user"), tools)
        text = self._render(messages, add_generation_prompt=True, tools=tools)
        return self.encode(text), text

    @property
    def is_plain(self) -> bool:
        """Whether prompts are plain text: without a template, or by one that writes nothing around a question."""
        try:
            return self.prompt(QUESTION)[1] == QUESTION
        except ValueError:  # it insists on a system message
            return False

    def renders_as(self, other: Renderer, prompts: bool = False) -> bool:
        """Whether both render a conversation, with or without a message of the system, alike; with ``prompts``, also one that
        is to be answered. Both have a template."""
        for question in PROBES:
            conversation = [*question, *assistant(ANSWER)]
            with suppress(ValueError):  # a template may take no system message, or insist on one
                if self.conversation(conversation) != other.conversation(conversation):
                    return False
                if prompts and self.prompt(question) != other.prompt(question):
                    return False
        return True

    def conversation(self, messages: Messages, tools: Tools | None = None) -> str:
        """Text of a whole conversation, with tools as the template shows them."""
        return self._render(messages, add_generation_prompt=False, tools=tools)

    def encode_conversation(self, messages: Messages, tools: list[dict[str, Any]] | None) -> Ids:
        """Ids of a conversation up to the assistant's next turn, with tools as the template shows them."""
        messages = self.fields.fitted(messages, tools, whose="the agent offers")
        return self.encode(self._render(messages, add_generation_prompt=True, tools=tools))

    def encode_reply(self, messages: Messages, ended_by: int | None, tools: Tools | None = None) -> Ids:
        """Token ids of ``messages`` that follow an assistant turn, up to the next turn, in a conversation with ``tools``.

        ``ended_by`` is the stop token that ended the turn, None for a truncated turn, which is closed here. Raises UserError if
        the template renders a turn differently once another follows; only its end may differ.
        """
        tail = self._behind_turn(messages, tools)
        if ended_by is None:
            return self._encode_behind(ANSWER, tail)
        end = self.turn_end.text
        if not tail.startswith(end):  # some templates end the last turn differently from earlier ones
            end = next(iter(self._closing.runs(tail)), "")
        tail = tail.removeprefix(end)
        ids = self._encode_behind(self._tokenizer.convert_ids_to_tokens(ended_by), tail)
        return ids[1:] if ids[:1] == [ended_by] else ids  # a turn that ends where the next one begins

    def _behind_turn(self, messages: Messages, tools: Tools | None) -> str:
        """The template's text behind an answer that ``messages`` follow, up to the next turn; it begins with the turn's end."""
        if not self.template:
            return "".join(message["content"] for message in messages)
        turn = [*user(QUESTION), *assistant(ANSWER)]
        try:
            before, _, tail = self._render([*turn, *messages], True, tools).partition(ANSWER)
            unchanged = before == self._render(turn, False, tools).partition(ANSWER)[0]
        except ValueError:
            if not (calls := answered_calls(messages)):
                raise
            turn[-1] = {"role": "assistant", "content": "", "tool_calls": calls}
            alone = self._render(turn, False, tools)
            after, end = self._render([*turn, *messages], True, tools), self.split_end(alone)[1]
            unchanged, tail = after.startswith(alone), after[alone.rindex(end) if end else len(alone) :]
        if not unchanged:
            raise UserError(
                "the chat template renders an assistant turn, or what is before it, differently once a reply follows, for "
                "example without thoughts or with the tools elsewhere; set model.chat_template to one that keeps turns as they "
                "were sampled, such as TRL's qwen3_training for Qwen3 (docs/recipes/environments.md)"
            )
        return tail

    def encode_opening(self, prompt: str, messages: Messages, tools: Tools | None = None) -> Ids:
        """Ids of a rendered ``prompt`` with its generation prompt and ``tools``, followed by ``messages`` of others before the
        answer.

        Raises UserError if the template renders the prompt differently then.
        """
        if not self.template:
            return self.plain(prompt + "".join(message["content"] for message in messages))
        question = self._render(user(QUESTION), True, tools)
        after = self._render([*user(QUESTION), *messages], True, tools)
        same = common_prefix(question, after)
        if QUESTION not in question[:same] or not prompt.endswith(question[same:]):
            raise UserError("the chat template renders a prompt differently once another message follows")
        return self.encode(prompt.removesuffix(question[same:]) + after[same:])

    def encode(self, text: str) -> Ids:
        """Ids of a text, without anything that the tokenizer would add around it."""
        text = self.images.expanded(text) if self.images else text
        if self._backend is not None:
            return list(self._encoding(text).ids)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encoding(self, text: str) -> Any:
        """Of ``tokenizers``, without the truncation and padding that a tokenizer.json or an earlier call may have left."""
        if self._backend.truncation or self._backend.padding:
            self._backend.no_truncation()
            self._backend.no_padding()
        return self._backend.encode(text, add_special_tokens=False)

    def decode(self, ids: Ids, images: Sequence[str] = ()) -> str:
        """Text of ids, special tokens included, with stand-ins for the tokens of ``images``."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        return self.images.collapsed(text, images) if self.images else text

    def encode_parts(self, text: str, parts: Sequence[tuple[int, int]]) -> tuple[Ids, list[tuple[int, int]]]:
        """Ids of a text, and the range of tokens of each part, which is a range of characters (first, end).

        A token belongs to a part if any of its characters do.
        """
        if self.images:
            text, places = self.images.moved(text, [place for part in parts for place in part])
            parts = list(zip(places[::2], places[1::2], strict=True))
        if self._backend is None:
            ids = self.encode(text)
            counts = [common_prefix(self.encode(text[:place]), ids) for part in parts for place in part]
            return ids, list(zip(counts[::2], counts[1::2], strict=True))
        encoding = self._encoding(text)
        tokens = zip(encoding.ids, encoding.offsets, strict=True)
        ends = [len(text[:end].rstrip()) if token in self._rstrip else end for token, (_, end) in tokens]
        ends = list(accumulate(ends, max))

        def behind(place: int) -> int:
            count = bisect_right(ends, place)
            return count if count and ends[count - 1] == place else min(count + 1, len(ends))

        return list(encoding.ids), [(bisect_right(ends, first), behind(last)) for first, last in parts]

    def continued(self, prompt: str, parts: Sequence[str]) -> tuple[Ids, Ids, list[int]]:
        """Ids of a rendered ``prompt``, ids of the ``parts`` that continue it, and the number of these up to the end of each
        part."""
        ends = list(accumulate(map(len, parts), initial=len(prompt)))
        ids, places = self.encode_parts(prompt + "".join(parts), list(pairwise(ends)))
        cut = places[0][0] if places else len(ids)
        prompt_ids = ids[:cut] if self.template else self._behind_bos(ids[:cut])
        return prompt_ids, ids[cut:], [last - cut for _, last in places]

    def _encode_behind(self, context: str, text: str) -> Ids:
        """Ids of a text that follows ``context``."""
        before, ids = self.encode(context), self.encode(context + text)
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text)

    def _turn(
        self, prompt: str | Messages, answer: str | Messages, tools: Tools | None, whole: bool
    ) -> tuple[str, str]:
        """Text of the prompt, and of one answer in the template's continuation of the prompt."""
        check_unanswered(prompt)
        if isinstance(prompt, str) and isinstance(answer, str):
            if not self.template and not tools:
                return prompt, answer
            prompt, answer = user(prompt), assistant(answer)
        messages = self.fields.fitted([*prompt, *answer], tools)
        before, after = self.around(messages, len(prompt), tools)
        if whole:
            self.fields.check_whole(messages, len(prompt), after.removeprefix(before), tools)
        return before, after.removeprefix(before)

    def around(self, messages: Messages, turn: int, tools: Tools | None = None) -> tuple[str, str]:
        """The text before assistant turn number ``turn``, as at inference, and the text with it; of fitted messages.

        Raises ValueError if the turn does not continue its generation prompt: trained behind what both begin with, as by TRL,
        it would be sampled behind another text.
        """
        before = self._render(messages[:turn], add_generation_prompt=True, tools=tools)
        after = self._render(messages[: turn + 1], add_generation_prompt=False, tools=tools)
        if not after.startswith(before):
            switch = ", or `model.chat_template_kwargs: {enable_thinking: false}`"
            raise ValueError(
                "the chat template renders an assistant turn differently from its generation prompt: the rendered "
                f"turn does not begin with the prompt, which ends with {before[-40:]!r}: set `chat_template` to one that "
                f"renders both alike{switch if 'enable_thinking' in str(self.template) else ''}"
            )
        return before, after

    def join(self, prompt: str, spans: list[tuple[str, bool]], empty: bool, bos: Ids | None = None) -> TrainingText:
        """A prompt and spans of (text, is it a target), encoded as one text behind ``bos``; the last span is a target.

        The targets are answers and the ends of their turns; what the template writes behind these belongs to the next span.
        The last one ends with EOS if it has no end of its own.
        """
        text = prompt
        parts = list[tuple[int, int]]()
        ends = list[str]()
        end = ""
        for span, target in spans:
            content, end = self.split_end(span)
            if target:
                parts.append((len(text), len(text) + len(content) + len(end)))
                ends.append(end)
            text += content + end if target else span
        ids, places = self.encode_parts(text, parts)
        if parts[0][0] == len(prompt):  # an answer may change the prompt's last tokens
            places[0] = (min(places[0][0], common_prefix(self.encode(prompt), ids)), places[0][1])
        mask = [0] * len(ids)
        for (first, last), own in zip(places, ends, strict=True):
            last += not own and ids[last : last + 1] == [self._eos_id]  # some templates write EOS only between turns
            mask[first:last] = [1] * (last - first)
        if not end:
            ids, mask, text = [*ids, self._eos_id], [*mask, 1], text + self._eos
        if bos and ids[: len(bos)] != bos:
            ids, mask = bos + ids, [0] * len(bos) + mask
        return TrainingText(ids, mask, text, empty)

    def split_end(self, turn: str) -> tuple[str, str]:
        """A rendered assistant turn as the answer and the end of the turn, without text behind that end.

        The end is empty if the template writes none, so that EOS has to follow the answer.
        """
        tail = self.turn_end.tail
        if tail and turn.endswith(tail):
            return turn.removesuffix(tail), self.turn_end.text
        text = turn.rstrip()  # templates may close some turns, such as calls of tools, differently
        end = self._closing.last(text) if self.turn_end.text else ""
        if not end and text.endswith(self._eos):
            return text.removesuffix(self._eos), ""
        return (text.removesuffix(end), end) if end else (turn, "")

    def plain(self, prompt: str) -> Ids:
        """Ids of a text without a template, behind the tokenizer's BOS."""
        return self._behind_bos(self.encode(prompt))

    def _behind_bos(self, ids: Ids) -> Ids:
        return ids if ids[: len(self.bos)] == self.bos else self.bos + ids

    def _render(self, messages: Messages, add_generation_prompt: bool, tools: Tools | None = None) -> str:
        from jinja2 import TemplateError

        if not self.template:
            raise UserError(
                "the rows are messages, and neither the tokenizer nor the data set has a chat template (`plain` is none): "
                "set `chat_template` in the recipe (of the data or of the model)"
            )
        images = images_in_messages(messages)
        if images and self.images is None:
            raise UserError("the messages have images, and the model reads text alone: choose an image-text model")
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    for_template(messages, self._in_parts),
                    tools=tools,
                    chat_template=self.template if isinstance(self.template, str) else None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **({"strftime_now": TODAY.strftime} if self.asks_for_today else {}),
                )
            )
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return self.images.marked(text, images) if self.images else text

    def _shows_parts_alone(self) -> bool:
        """Whether the template shows no content that is a text, but a list of parts, as LLaVA's does."""
        for self._in_parts in (False, True):
            for question in PROBES:
                with suppress(ValueError):
                    if QUESTION in self._render(question, False):
                        return self._in_parts
        return False

    def _check_template(self) -> None:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            self._tokenizer.apply_chat_template(
                user("a"), chat_template=self.template if isinstance(self.template, str) else None, tokenize=False
            )
        except TemplateSyntaxError as error:
            raise UserError(f"chat_template: is not valid Jinja, line {error.lineno}: {error.message}") from None
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError, ValueError):
            return  # a template may require a system message, for example: each row is rendered anyway


def for_template(messages: Messages, in_parts: bool) -> Messages:
    """Messages as chat templates get them: images are not named; with ``in_parts``, all contents are lists of parts."""
    if not in_parts and not images_in_messages(messages):
        return messages
    contents = [message.get("content") for message in messages]
    return [
        {**message, "content": [{"type": "image"} if is_image(part) else part for part in content]}
        if isinstance(content, list)
        else {**message, "content": [{"type": "text", "text": content}]}
        if in_parts and isinstance(content, str)
        else message
        for message, content in zip(messages, contents, strict=True)
    ]


def check_unanswered(prompt: str | Messages) -> None:
    """Raise ValueError for a prompt that ends with an assistant's turn. TRL lets answers continue that turn; here they would be
    another turn behind its end."""
    if isinstance(prompt, list) and prompt and prompt[-1]["role"] == "assistant":
        raise ValueError(
            "the prompt ends with an assistant message, which answers do not continue: begin the answers with its text, or "
            "leave it out"
        )


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Length of the common prefix of two sequences."""
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
