"""Token ids and loss masks: the prompt equals the encoding at inference, the targets are the assistant's text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.kinds.texts import Text
from alignment_core.data.template import Renderer
from alignment_core.errors import UserError
from alignment_core.models.template_kwargs import with_kwargs
from alignment_core.models.tokenizer import byte_tokenizer
from tests.data.chat_templates import FORGETS_THOUGHTS, NEWLINE_AFTER_EOS, NO_EOS, REFUSES_SYSTEM


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TWO_TURNS = [
    message("user", "a"),
    message("assistant", "<think>x</think>b"),
    message("user", "c"),
    message("assistant", "<think>y</think>d"),
]


def targets(tokenizer: Any, text: Any) -> str:
    """The trained targets as text; gaps are shown as |."""
    spans, last = [""], 0
    for token, target in zip(text.input_ids, text.loss_mask, strict=True):
        if target and not last:
            spans.append("")
        if target:
            spans[-1] += tokenizer.decode([token])
        last = target
    return "|".join(spans[1:])


def test_prompt_and_completion_become_a_user_and_an_assistant_turn(tokenizer: Any) -> None:
    (text,) = Demonstration("hi", "yo").render(Renderer(tokenizer))
    assert text.text == "<user>hi<assistant>yo<eos>"
    assert text.input_ids == [258, *b"hi", 259, *b"yo", 257]
    assert text.loss_mask == [0, 0, 0, 0, 1, 1, 1]


def test_every_assistant_turn_of_a_conversation_is_a_target_and_nothing_else_is(tokenizer: Any) -> None:
    (text,) = Demonstration([], TWO_TURNS).render(Renderer(tokenizer))
    assert targets(tokenizer, text) == "<think>x</think>b<eos>|<think>y</think>d<eos>"


def test_a_newline_that_the_template_puts_behind_eos_is_no_target(tokenizer: Any) -> None:
    (text,) = Demonstration([], TWO_TURNS).render(Renderer(tokenizer, NEWLINE_AFTER_EOS))
    assert targets(tokenizer, text) == "<think>x</think>b<eos>|<think>y</think>d<eos>"
    assert text.text.count("<eos>\n<user>") == 1  # between the turns it stays, as in the history at inference
    assert text.input_ids[-1] == tokenizer.eos_token_id


def test_eos_is_added_as_a_target_if_the_template_writes_none(tokenizer: Any) -> None:
    (text,) = Demonstration("hi", "yo").render(Renderer(tokenizer, NO_EOS))
    assert text.text == "user: hi\nassistant: yo<eos>", "behind the answer: the newline belongs to the next message"
    assert targets(tokenizer, text) == "yo<eos>"


def test_template_that_rewrites_history_gives_a_row_per_turn_as_in_inference(tokenizer: Any) -> None:
    first, second = Demonstration([], TWO_TURNS).render(Renderer(tokenizer, FORGETS_THOUGHTS))
    assert first.text == "<user>a<assistant><think>x</think>b<eos>"
    assert second.text == "<user>a<assistant>b<eos><user>c<assistant><think>y</think>d<eos>"
    assert targets(tokenizer, second) == "<think>y</think>d<eos>"


def test_template_that_rewrites_history_keeps_one_row_without_thoughts_to_remove(tokenizer: Any) -> None:
    chat = [message(m["role"], m["content"].split(">")[-1]) for m in TWO_TURNS]
    (text,) = Demonstration([], chat).render(Renderer(tokenizer, FORGETS_THOUGHTS))
    assert targets(tokenizer, text) == "b<eos>|d<eos>"


def test_assistant_turns_inside_a_prompt_are_no_targets(tokenizer: Any) -> None:
    (text,) = Demonstration(TWO_TURNS[:3], TWO_TURNS[3:]).render(Renderer(tokenizer))
    assert targets(tokenizer, text) == "<think>y</think>d<eos>"


def test_plain_text_is_a_target_as_a_whole_and_ends_with_eos(tokenizer: Any) -> None:
    text = Text("once").render(Renderer(tokenizer))
    assert (text.input_ids, text.loss_mask) == ([*b"once", 257], [1] * 5)


def test_eos_that_is_there_already_is_not_doubled(tokenizer: Any) -> None:
    text = Text("once<eos>").render(Renderer(tokenizer))
    assert text.input_ids == [*b"once", 257]


def test_strings_without_a_template_are_concatenated(plain_tokenizer: Any) -> None:
    (text,) = Demonstration("1+1=", "2").render(Renderer(plain_tokenizer))
    assert (text.text, text.input_ids, text.loss_mask) == ("1+1=2<eos>", [*b"1+1=2", 257], [0, 0, 0, 0, 1, 1])


def test_messages_without_a_template_ask_for_chat_template(plain_tokenizer: Any) -> None:
    with pytest.raises(UserError, match="set `chat_template`"):
        Demonstration([], TWO_TURNS).render(Renderer(plain_tokenizer))


def test_template_of_the_data_set_goes_before_the_tokenizers_own(plain_tokenizer: Any) -> None:
    assert Renderer(plain_tokenizer, NO_EOS).prompt("hi")[1] == "user: hi\nassistant: "


def test_template_with_a_syntax_error_is_refused_with_its_line(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="chat_template: is not valid Jinja, line 2"):
        Renderer(tokenizer, "ok\n{% for %}")


def test_conversation_that_the_template_refuses_is_refused_with_the_error_of_the_template(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no system messages here"):
        Renderer(tokenizer, REFUSES_SYSTEM).prompt([message("system", "s"), message("user", "u")])


def test_template_whose_generation_prompt_differs_from_its_rendering_is_refused(tokenizer: Any) -> None:
    thinks_ahead = NO_EOS.replace("assistant: {% endif %}", "assistant: <think>{% endif %}")
    with pytest.raises(
        ValueError, match=r"differently from its generation prompt.*<think>': set `chat_template` .* alike$"
    ):
        Demonstration("hi", "yo").render(Renderer(tokenizer, thinks_ahead))


def test_the_switch_of_the_template_is_named_where_its_generation_prompt_opens_a_thought(tokenizer: Any) -> None:
    """As NVIDIA's Nemotron 3: turns without thoughts begin otherwise than the prompt that they are sampled behind."""
    opened = "assistant: {% if enable_thinking | default(true) %}<think>{% endif %}{% endif %}"
    switched = NO_EOS.replace("assistant: {% endif %}", opened)
    with pytest.raises(ValueError, match=r"alike, or `model.chat_template_kwargs: \{enable_thinking: false\}`"):
        Demonstration("hi", "yo").render(Renderer(tokenizer, switched))
    off = with_kwargs(switched, {"enable_thinking": False})
    (text,) = Demonstration("hi", "yo").render(Renderer(tokenizer, off))
    assert text.text == "user: hi\nassistant: yo<eos>"


@pytest.mark.parametrize("template", [None, NEWLINE_AFTER_EOS, NO_EOS, FORGETS_THOUGHTS])
def test_prompt_ids_of_training_and_inference_are_the_same(tokenizer: Any, template: str | None) -> None:
    renderer = Renderer(tokenizer, template)
    prompt, _ = renderer.prompt("hi")
    (text,) = Demonstration("hi", "yo").render(renderer)
    assert text.input_ids[: text.loss_mask.index(1)] == prompt
    assert Preference("hi", "yo", "no").render(renderer)["prompt_ids"] == prompt


@pytest.mark.parametrize("template", [None, NEWLINE_AFTER_EOS, NO_EOS, FORGETS_THOUGHTS])
def test_both_answers_of_a_pair_end_with_one_eos(tokenizer: Any, template: str | None) -> None:
    pair = Preference("hi", "yo", "no").render(Renderer(tokenizer, template))
    for ids in (pair["chosen_ids"], pair["rejected_ids"]):
        assert ids.count(257) == 1
        assert ids[-1] == 257
    assert pair["chosen"].strip() == "yo"


def with_bos(template: str | None) -> Any:
    """A byte tokenizer that, as Llama's, begins every text with a special token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(template)
    tokenizer.bos_token = "<unused0>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unused0> $A", special_tokens=[("<unused0>", tokenizer.bos_token_id)]
    )
    if template is None:
        tokenizer.chat_template = None
    return tokenizer


@pytest.mark.parametrize("template", [None, "<unused0>" + NO_EOS])
def test_bos_is_once_at_the_beginning(template: str | None) -> None:
    tokenizer = with_bos(template)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    renderer = Renderer(tokenizer)
    (text,) = Demonstration("hi", "yo").render(renderer)
    pair = Preference("hi", "yo", "no").render(renderer)
    for ids in (text.input_ids, pair["prompt_ids"] + pair["chosen_ids"]):
        assert ids.index(tokenizer.bos_token_id) == 0
        assert ids.count(tokenizer.bos_token_id) == 1


def test_plain_rows_are_encoded_by_the_tokenizer_alone_with_its_bos() -> None:
    """A template of the contents alone writes no BOS, as ``apply_chat_template`` adds none."""
    tokenizer = with_bos(NO_EOS)
    renderer = Renderer(tokenizer, "plain")
    ids = tokenizer("hi yo")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert renderer.prompt("hi") == (ids[:3], "hi")
    (text,) = Demonstration("hi", " yo").render(renderer)
    assert text.input_ids == [*ids, tokenizer.eos_token_id]
    pair = Preference("hi", " yo", " no").render(renderer)
    assert pair["prompt_ids"] + pair["chosen_ids"] == text.input_ids
    assert Renderer(tokenizer, "{{ messages[0].content }}").prompt("hi")[0] == ids[1:3]
    with pytest.raises(UserError, match=r"the rows are messages, .* \(`plain` is none\): set `chat_template`"):
        Demonstration([], TWO_TURNS).render(renderer)


def test_tokenizer_without_eos_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-sequence"):
        Renderer(tokenizer)


TOKENIZER = byte_tokenizer()
PLAIN = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=12)  # type: ignore[arg-type]


@given(st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=4))
def test_ids_decode_to_the_rendered_text_and_targets_to_the_answers(turns: list[tuple[str, str]]) -> None:
    tokenizer = TOKENIZER
    chat = [message(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    (text,) = Demonstration([], chat).render(Renderer(tokenizer))
    assert tokenizer.decode(text.input_ids) == text.text == tokenizer.apply_chat_template(chat, tokenize=False)
    trained = [token for token, target in zip(text.input_ids, text.loss_mask, strict=True) if target]
    assert tokenizer.decode(trained) == "".join(f"{answer}<eos>" for _, answer in turns)
