"""Fields of messages: texts in parts, weights of turns, and fields that a chat template may not show.

A field is shown if rendering a conversation with and without it gives different texts.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignment_core.data.images import image_part, is_image
from alignment_core.data.messages import Messages
from alignment_core.errors import UserError

if TYPE_CHECKING:
    from alignment_core.data.image_reader import RowImages

Message = dict[str, Any]
Tools = list[dict[str, Any]]

WEIGHTS = ("weight", "train", "training", "loss_mask", "loss")
"""Whether an assistant turn is a target: 0 or 1, or false or true. ``weight`` as in OpenAI's format for fine-tuning, ``train``
and ``training`` as in Axolotl, ``loss_mask`` as in slime and verl, ``loss`` (only as a boolean) as in ms-swift."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The reasoning of an assistant turn, under the names that chat templates use."""
CALLS = ("tool_calls", "function_call")
MEDIA = ("images", "image", "image_url", "videos", "video", "audios", "audio", "input_audio")
"""Fields of messages, and columns, of images, video and audio."""
CONTEXT = (
    *MEDIA,
    "system",
    "system_prompt",
    "input",
    "history",
    "tools",
    "functions",
    "documents",
    "chat_template_kwargs",
)
"""Columns that other libraries put into the prompt. Some kinds of rows read some of them."""
_TAG = re.compile(r"</?\w+>")
_TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE_FIELDS = ("image", "image_url", "url", "path")
"""Names of an image in its part: of ``datasets`` and TRL, OpenAI, and chat templates of ``transformers``."""
PLACEHOLDER = "<image>"
"""The place of an image of the row's own column in a text, as in LLaVA-Instruct and LLaMA-Factory."""
_ONLY_TEXT = "only text is read here: images need an image-text model and demonstrations, pairs, completions or prompts"
_OF_TOOLS = ("name", "tool_call_id")
"""Fields of a tool's message that identify the call it answers; templates that need them raise an error without them."""


def in_parts(message: Mapping[str, Any], name: str, images: RowImages | None = None) -> Message:
    """The message with a ``content`` of text parts as one text; with images, as texts and images by their digests.

    ``images`` reads an image; without it, the model or these rows take text alone. A part for an image that names none stays
    without a digest, for :func:`with_images`. Raises ValueError for other media, and for images of an assistant.
    """
    for field in MEDIA:
        if message.get(field):
            raise ValueError(
                f"`{name}.{field}` is not text: images belong into parts of `content`, other media are not read"
            )
    content = message.get("content")
    if not isinstance(content, list) or not content or not all(isinstance(part, str | Mapping) for part in content):
        return dict(message)
    parts: list[Message] = []
    for at, part in enumerate(content):
        where = f"{name}.content[{at}]"
        if images is not None and names_image(part):
            if message.get("role") == "assistant":
                raise ValueError(f"`{where}` is an image: assistant messages cannot contain images")
            parts.append(_image(part, where, images))
        elif parts and not is_image(parts[-1]):
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + _text(part, where)}
        else:
            parts.append({"type": "text", "text": _text(part, where)})
    whole = parts if any(map(is_image, parts)) else parts[0]["text"]
    return {**message, "content": whole}


def names_image(part: str | Mapping[str, Any]) -> bool:
    """Whether a part of a content is an image, in any of the forms that are read."""
    if isinstance(part, str):
        return False
    return part.get("type") in IMAGE_PARTS or ("type" not in part and any(map(part.get, ("image", "image_url"))))


def _image(part: str | Mapping[str, Any], name: str, images: RowImages) -> Message:
    assert isinstance(part, Mapping)
    if all(part.get(field) is None for field in IMAGE_FIELDS):
        return {"type": "image"}
    return image_part(images(named_image(part), name))


def named_image(part: Mapping[str, Any]) -> Any:
    """What the part for an image has as its image: a path, bytes, …; None if it names none."""
    field = next((field for field in IMAGE_FIELDS if part.get(field) is not None), None)
    image = part[field] if field else None
    return image.get("url") if field == "image_url" and isinstance(image, Mapping) else image


def _text(part: str | Mapping[str, Any], name: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if part.get("type", "text") in _TEXT_PARTS else None
    if not isinstance(text, str):
        kind = f"a part of the type {part.get('type')!r}" if isinstance(part, Mapping) else "null"
        raise ValueError(
            f"`{name}` is {kind}, and {_ONLY_TEXT if names_image(part) else 'only text and images are read'}"
        )
    return text


def with_images(messages: Messages, digests: Sequence[str], name: str, first_turn: bool) -> tuple[Messages, int]:
    """The messages with images of the row's own column in the parts that name none, and how many it took.

    Without an image in any part, and with ``first_turn``, all are put in front of the first text of the user, as TRL does.
    Raises ValueError for more parts than images.
    """
    parts = [part for message in messages for part in _parts(message) if is_image(part)]
    unnamed = sum("image" not in part for part in parts)
    if unnamed > len(digests):
        raise ValueError(f"`{name}` has {unnamed} places for images, and the row's `images` are {len(digests)}")
    if not parts and first_turn and digests:
        place = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
        if place is None:
            return messages, 0
        text = {"type": "text", "text": messages[place]["content"]}
        content = [*map(image_part, digests), *([text] if text["text"] else [])]
        return [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]], len(digests)
    left = iter(digests)
    return [
        {**message, "content": [part if _is_known_part(part) else image_part(next(left)) for part in _parts(message)]}
        if _parts(message)
        else message
        for message in messages
    ], unnamed


def split_at_placeholders(messages: Messages) -> Messages:
    """The messages with a part for an image in the place of each :data:`PLACEHOLDER` in a text that is not the assistant's;
    unchanged if they have parts for images."""
    if any(is_image(part) for message in messages for part in _parts(message)):
        return messages
    return [message if message["role"] == "assistant" else _split_at_placeholders(message) for message in messages]


def _split_at_placeholders(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, str) or PLACEHOLDER not in content:
        return message
    first, *others = content.split(PLACEHOLDER)
    parts: list[Message] = [{"type": "text", "text": first}]
    for text in others:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return {**message, "content": [part for part in parts if is_image(part) or part["text"]]}


def _parts(message: Message) -> list[Message]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_known_part(part: Message) -> bool:
    return not is_image(part) or "image" in part


def is_target(message: Mapping[str, Any], name: str) -> bool | None:
    """Whether a message's own weight makes it a training target; None without a weight. Raises ValueError for other values."""
    weights: dict[str, bool] = {}
    for field in WEIGHTS:
        value = message.get(field)
        if value is None or (field == "loss" and not isinstance(value, bool)):
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"`{name}.{field}` is {value!r}; a turn is trained (1 or true) or not (0 or false)")
        weights[field] = bool(value)
    if len(set(weights.values())) > 1:
        raise ValueError(f"{' and '.join(f'`{name}.{field}`' for field in weights)} contradict each other")
    for field, trained in weights.items():
        if trained and message.get("role") != "assistant":
            raise ValueError(
                f"`{name}.{field}` is set on a message of the role {message.get('role')!r}; only assistant turns are trained"
            )
        return trained
    return None


def without_weights(messages: Messages, name: str) -> Messages:
    """The messages without weights of turns, which no template shows. Raises ValueError for invalid weights."""
    unweighted = []
    for number, message in enumerate(messages):
        is_target(message, f"{name}[{number}]")
        weights = {field for field in WEIGHTS if field != "loss" or isinstance(message.get(field), bool)}
        unweighted.append({field: value for field, value in message.items() if field not in weights})
    return unweighted


def untrained(messages: Messages, name: str) -> list[int]:
    """The places of the assistant turns whose weight is 0."""
    return [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and is_target(message, f"{name}[{place}]") is False
    ]


def is_silent(message: Mapping[str, Any]) -> bool:
    """Whether a turn has no content, reasoning or calls."""
    return not message["content"].strip() and not any(map(message.get, (*CALLS, *REASONING)))


class ShownFields:
    """The fields of messages and tools that one chat template shows.

    ``render`` is called with messages, whether to add a generation prompt, and tools; it raises ValueError for a conversation
    that the template refuses.
    """

    def __init__(self, render: Callable[[Messages, bool, Tools | None], str]) -> None:
        self._render = render
        self._shown: set[tuple[Any, ...]] = set()
        """(Role, field, is first message) of fields that the template shows, and (role, *fields beside it) of shown content."""
        self._hidden: set[tuple[Any, ...]] = set()
        """(Role, field, is first message) of fields that the template does not show."""
        self._tools_shown = False
        self.unread: Counter[str] = Counter()
        """Number of messages with content or an unknown field that the template does not show, by the sentence about it."""

    def fitted(self, messages: Messages, tools: Tools | None = None, whose: str = "the rows have") -> Messages:
        """The conversation with reasoning under the field name, and arguments of calls in the form, that the template reads.

        Raises ValueError for reasoning, calls and content of an assistant that the template does not show, and UserError for a
        template that shows no tools. Other content and fields that it leaves out are counted in ``unread``.
        """
        fitted: Messages = []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                message = self._fitted(fitted, message, messages[place + 1 :], tools)
            fitted.append(message)
        for place in range(len(fitted)):
            self._note_unread(fitted, place, tools)
        if tools:
            self._check_tools(fitted, tools, whose)
        return fitted

    def check_whole(self, messages: Messages, turn: int, text: str, tools: Tools | None) -> None:
        """Raise ValueError if the template leaves out words of the content of assistant turn number ``turn``, the last one in
        its ``text``, as templates do that drop what is before ``</think>``."""
        message, before = messages[turn], messages[:turn]
        content = message["content"]
        if content.strip() in text:
            return
        words, known = _TAG.sub(" ", content).split(), set(_TAG.sub(" ", text).split())
        absent = (word for word in dict.fromkeys(words) if word not in known and word not in text)
        for word in itertools.islice(absent, 8):  # a template may spell words otherwise
            changed = {**message, "content": content.replace(word, f"{word}?")}
            if not self._differs([*before, message], [*before, changed], [], tools):
                raise ValueError(
                    f"`content` of message {turn + 1} is not shown whole by the chat template, which leaves out "
                    f"{word[:40]!r}: remove it, or set `chat_template` to one that shows it"
                )

    def _fitted(self, before: Messages, message: Message, rest: Messages, tools: Tools | None) -> Message:
        """An assistant turn whose reasoning, calls and content the template shows while it is the last turn."""
        where = f"message {len(before) + 1}"

        def differs(message: Message, changed: Message) -> bool:
            return self._differs([*before, message], [*before, changed], rest, tools)

        message = self._with_readable_arguments(before, message, tools)
        message = _with_shown_thoughts(message, differs, where)
        for field in CALLS:
            if message.get(field) and not differs(message, _without_last(message, field)):
                verb = "are" if field == "tool_calls" else "is"
                raise ValueError(
                    f"`{field}` of {where} {verb} not shown by the chat template: set `chat_template` to one that shows calls"
                )
        beside = tuple(name for name in (*CALLS, *REASONING) if message.get(name))
        if message["content"].strip() and ("assistant", *beside) not in self._shown:
            if not differs(message, {**message, "content": f"{message['content']}?"}):
                raise ValueError(
                    f"`content` of {where} is not shown by the chat template"
                    + (f" beside {', '.join(f'`{name}`' for name in beside)}" if beside else "")
                    + ": leave it out, or set `chat_template` to one that shows it"
                )
            self._shown.add(("assistant", *beside))
        return message

    def _with_readable_arguments(self, before: Messages, message: Message, tools: Tools | None) -> Message:
        """The turn with the arguments of its calls as JSON text where the template, as DeepSeek's, refuses objects."""
        if not message.get("tool_calls") or self._renders([*before, message], tools):
            return message
        in_text = _with_arguments_in_text(message)
        return in_text if self._renders([*before, in_text], tools) else message

    def _renders(self, messages: Messages, tools: Tools | None) -> bool:
        try:
            self._render(messages, False, tools)
        except ValueError:
            return False
        return True

    def _note_unread(self, messages: Messages, place: int, tools: Tools | None) -> None:
        """Count the fields of a message that the template shows at no place of the conversation."""
        message = messages[place]
        role, before, rest = message["role"], messages[:place], messages[place + 1 :]
        for field, value in message.items():
            shape = (role, field, place == 0)
            if _is_empty(value) or _is_known(role, field, value) or shape in self._shown:
                continue
            changed = {**message, field: _longer(value)} if field == "content" else _without(message, field)
            if shape in self._hidden or not self._differs(
                [*before, message, *rest], [*before, changed, *rest], [], tools
            ):
                self.unread[f"{role} messages have `{field}`, which the chat template does not show"] += 1
                self._hidden |= {shape} if field != "content" else set()
            else:
                self._shown.add(shape)

    def _check_tools(self, messages: Messages, tools: Tools, whose: str) -> None:
        """Raise if the template does not show the tools: a model would be trained to call tools that it cannot see."""
        prompt = list(messages)
        while len(prompt) > 1 and prompt[-1]["role"] == "assistant":
            prompt.pop()
        if self._render(prompt, True, tools) != self._render(prompt, True, tools[:-1] or None):
            self._tools_shown = True
        elif self._tools_shown:
            raise ValueError("the chat template does not show the `tools` in this conversation, as it does in others")
        else:
            raise UserError(
                f"{whose} `tools`, which the chat template does not show: set `chat_template` to one that does"
            )

    def _differs(self, messages: Messages, changed: Messages, rest: Sequence[Message], tools: Tools | None) -> bool:
        """Whether two conversations are rendered differently. If the template refuses ``messages``, both are followed by
        ``rest``. ``changed`` counts as different if the template refuses it."""
        for more in ([], list(rest)):
            try:
                text = self._render([*messages, *more], False, tools)
            except ValueError:
                continue
            try:
                return text != self._render([*changed, *more], False, tools)
            except ValueError:
                return True
        return True  # refused either way: the rendering of the row itself raises the error


def _longer(content: Any) -> Any:
    """A content with one more character of text."""
    return [*content, {"type": "text", "text": "?"}] if isinstance(content, list) else f"{content}?"


def _is_empty(value: Any) -> bool:
    return value is None or value == [] or value == {} or (isinstance(value, str) and not value.strip())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_known(role: str, field: str, value: Any) -> bool:
    """Whether the field needs no check: part of the role's form, or checked by ``_fitted`` in an assistant turn."""
    if role == "assistant":
        return field in ("role", "content", *CALLS) or (field in REASONING and isinstance(value, str))
    return field == "role" or (role == "tool" and field in _OF_TOOLS)


def _with_shown_thoughts(message: Message, differs: Callable[[Message, Message], bool], where: str) -> Message:
    """The turn with its reasoning under the first field name that the template shows; the row's own name comes first."""
    given = {name: message[name] for name in REASONING if _is_text(message.get(name))}
    if not given:
        return message
    bare = {name: value for name, value in message.items() if name not in given}
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(f'`{name}`' for name in given)} of {where} are different; give one of them")
    text = next(iter(given.values()))
    for name in dict.fromkeys((*given, *REASONING)):
        if differs({**bare, name: text}, bare):
            return {**bare, name: text}
    raise ValueError(
        f"`{next(iter(given))}` of {where} is not shown by the chat template: put the reasoning into `content` as the model "
        "writes them, or set `chat_template` to one that shows them"
    )


def _with_arguments_in_text(message: Message) -> Message:
    """The turn with the arguments of its calls as JSON text, OpenAI's form."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return message
        written = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": written} if "function" in call else written)
    return {**message, "tool_calls": calls}


def _without_last(message: Message, field: str) -> Message:
    """The message without its last call: a template may show the first one alone."""
    calls = message[field]
    several = isinstance(calls, list) and len(calls) > 1
    return {**message, field: calls[:-1]} if several else _without(message, field)


def _without(message: Message, field: str) -> Message:
    return {name: value for name, value in message.items() if name != field}
