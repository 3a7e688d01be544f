"""How a turn ends, where the template's end is not the tokenizer's EOS; the right values are the templates' own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.messages import user
from alignment_core.data.template import Renderer, TrainingText
from alignment_core.data.turn_end import chat_template_of, eos_token_ids, keep_chat_template, pass_chat_template_on
from alignment_core.models.tokenizer import byte_tokenizer
from tests.data.test_data_template import message

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
NEXT_TURN_IS_THE_END = (  # as GLM-4: a turn ends where the next one begins
    "{%- for m in messages -%}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- endif -%}"
)
LAST_TURN_ENDS_OTHERWISE = (  # as gpt-oss: <|return|> at the end, <|end|> before that
    "{%- for m in messages -%}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
NO_END = (  # as of base models: an empty line behind each message, and no token
    "{%- for m in messages -%}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|return|>", "<|user|>", "<|assistant|>"]
TWO_TURNS = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]


@pytest.fixture
def tokenizer(plain_tokenizer: Any) -> Any:
    """Bytes, with the special tokens of several families; EOS is <eos>, as of base models."""
    plain_tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return plain_tokenizer


def targets(tokenizer: Any, text: TrainingText) -> str:
    return str(tokenizer.decode([i for i, t in zip(text.input_ids, text.loss_mask, strict=True) if t]))


def test_a_turn_ends_with_the_end_of_the_template_and_no_eos_follows(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, CHATML)
    (text,) = Demonstration([], TWO_TURNS).render(renderer)
    assert (
        tokenizer.decode(text.input_ids)
        == text.text
        == tokenizer.apply_chat_template(TWO_TURNS, chat_template=CHATML, tokenize=False).removesuffix("\n")
    )
    assert targets(tokenizer, text) == "b<|im_end|>d<|im_end|>"
    answer = renderer.answered("hi", "ok")
    assert (tokenizer.decode(answer.ids), answer.text) == ("ok<|im_end|>", "ok")
    assert tokenizer.decode(renderer.answered("hi", "ok", closed=False).ids) == "ok"


def test_sampling_stops_at_the_end_of_the_template_at_eos_and_at_those_of_the_model(tokenizer: Any) -> None:
    end, eos = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id
    assert Renderer(tokenizer, CHATML).turn_end.stop_ids == (eos, end)
    assert Renderer(tokenizer, CHATML, [7, eos]).turn_end.stop_ids == (7, eos, end)
    assert Renderer(tokenizer).turn_end.stop_ids == (eos,), "no template"


def test_eos_of_a_model_is_one_id_or_several_as_in_generate(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert eos_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert eos_token_ids(tmp_path) == (5, 6)


@pytest.mark.parametrize("spelled", ["<eos>", "<|im_end|>", "<|im_start|>"])
def test_a_special_token_spelled_out_in_an_answer_takes_no_target_away(tokenizer: Any, spelled: str) -> None:
    sentence = f"It is {spelled} in this model."
    messages = [message("user", "a"), message("assistant", sentence), *TWO_TURNS[2:]]
    (text,) = Demonstration([], messages).render(Renderer(tokenizer, CHATML))
    assert targets(tokenizer, text) == f"{sentence}<|im_end|>d<|im_end|>"


@pytest.mark.parametrize(
    ("ended_by", "begins"),
    [
        ("<|im_end|>", "\n<|im_start|>user\nno<|im_end|>\n"),
        ("<eos>", "\n<|im_start|>user\nno<|im_end|>\n"),
        (None, "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n"),
    ],
    ids=["the template's end", "another stop token", "truncated"],
)
def test_a_reply_closes_the_turn_before_only_if_that_is_open(tokenizer: Any, ended_by: str | None, begins: str) -> None:
    end = None if ended_by is None else tokenizer.convert_tokens_to_ids(ended_by)
    ids = Renderer(tokenizer, CHATML).encode_reply(user("no"), end)
    assert tokenizer.decode(ids) == begins + "<|im_start|>assistant\n"


def test_a_turn_without_a_following_message_opens_the_next_turn(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.decode(Renderer(tokenizer, CHATML).encode_reply([], end)) == "\n<|im_start|>assistant\n"


def test_a_turn_that_ends_where_the_next_begins_is_not_begun_twice(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, NEXT_TURN_IS_THE_END, [tokenizer.convert_tokens_to_ids("<|user|>")])
    assert tokenizer.decode(renderer.answered("hi", "ok").ids) == "ok<eos>"
    begins = tokenizer.decode(renderer.encode_reply(user("no"), tokenizer.convert_tokens_to_ids("<|user|>")))
    assert begins == "\nno<|assistant|>\n"
    assert tokenizer.decode(renderer.encode_reply(user("no"), tokenizer.eos_token_id)) == "<|user|>\nno<|assistant|>\n"


def test_an_answer_that_spells_a_special_token_out_at_its_end_is_ended_all_the_same(tokenizer: Any) -> None:
    """By EOS where the template closes turns with no token, and by the template's own end."""
    answer = "It is <|return|>"
    assert tokenizer.decode(Renderer(tokenizer, NEXT_TURN_IS_THE_END).answered("hi", answer).ids) == f"{answer}<eos>"
    assert tokenizer.decode(Renderer(tokenizer, CHATML).answered("hi", answer).ids) == f"{answer}<|im_end|>"


def test_line_breaks_that_are_added_tokens_end_no_turn() -> None:
    """As of Gemma's tokenizers."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["\n", "\n\n", "▁▁"])
    assert tokenizer("\n\n")["input_ids"] == [tokenizer.convert_tokens_to_ids("\n\n")]
    renderer = Renderer(tokenizer, NO_END)
    eos, turn_end = tokenizer.eos_token_id, renderer.turn_end
    assert (turn_end.text, turn_end.token_id, turn_end.tail, turn_end.stop_ids) == ("", eos, "\n\n", (eos,))
    (text,) = Demonstration([], TWO_TURNS[:2]).render(renderer)
    assert text.text == "user: a\n\nassistant: b<eos>"
    assert targets(tokenizer, text) == "b<eos>"
    assert tokenizer.decode(renderer.answered("a", "b").ids) == "b<eos>"


def test_the_last_turn_may_end_otherwise_than_earlier_turns(tokenizer: Any) -> None:
    renderer = Renderer(tokenizer, LAST_TURN_ENDS_OTHERWISE)
    first, second = Demonstration([], TWO_TURNS).render(renderer)
    assert [targets(tokenizer, text) for text in (first, second)] == ["b<|return|>", "d<|return|>"]
    assert "b<|im_end|>" in second.text, "as the template shows history"
    ids = renderer.encode_reply(user("no"), tokenizer.convert_tokens_to_ids("<|return|>"))
    assert tokenizer.decode(ids) == "<|im_start|>user\nno<|im_end|><|im_start|>assistant\n"
    assert tokenizer.decode(renderer.encode_reply(user("no"), None)).startswith("<|im_end|><|im_start|>user")


def test_data_that_is_made_of_rendered_data_keeps_its_chat_template(tmp_path: Path) -> None:
    prompts, rollouts, pairs = (tmp_path / name for name in ("prompts", "rollouts", "pairs"))
    for folder in (prompts, rollouts, pairs):
        folder.mkdir()
    pass_chat_template_on(prompts, rollouts)
    assert chat_template_of(rollouts) is None, "the tokenizer's own was used"
    keep_chat_template(CHATML, prompts)
    pass_chat_template_on(prompts, rollouts)
    pass_chat_template_on(rollouts, pairs)
    assert chat_template_of(pairs) == CHATML
