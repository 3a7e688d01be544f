"""``generate`` returns exactly the trained ids for a policy that samples its trained text."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from alignment_core.data.kinds.demonstrations import Demonstration
from alignment_core.data.kinds.preferences import Preference
from alignment_core.data.messages import assistant, user
from alignment_core.data.template import Renderer
from tests.rendering import expected
from tests.rendering.conversations import THREE_TURNS
from tests.rendering.families import Family
from tests.rendering.rows import readable, rows_of


class Forced(LogitsProcessor):
    """Makes given ids the only possible ones: a policy that continues as the template does."""

    def __init__(self, ids: list[int], prompt_length: int) -> None:
        self._ids, self._prompt_length = ids, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._ids[input_ids.shape[1] - self._prompt_length]] = 0
        return forced


@functools.cache
def model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # models this small are slower where threads wait for each other
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(shape).eval()


def generated(family: Family, prompt: list[int], goes_on: list[int], stop_ids: Any) -> list[int]:
    """The sample of ``transformers`` with these stop ids from a policy that would ``go on`` so."""
    config = GenerationConfig(
        eos_token_id=sorted(stop_ids), pad_token_id=0, do_sample=False, max_new_tokens=len(goes_on), use_cache=True
    )
    ids = torch.tensor([prompt])
    forced = LogitsProcessorList([Forced(goes_on, len(prompt))])
    lm = model(max(1024, len(family.tokenizer)))
    out = lm.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, logits_processor=forced)
    return list(out[0, len(prompt) :].tolist())


def continuation(family: Family, prompt: list[int]) -> list[int]:
    """The template's text after the first question: the answer, the text that follows, and a further question."""
    if family.end is None:  # the policy ends its turn with EOS
        whole = expected.last_turn(family, THREE_TURNS[:2]).ids
    elif family.keeps_history:
        whole = expected.encoded(family, THREE_TURNS[:3])
    else:
        whole = expected.encoded(family, THREE_TURNS[:2]) + prompt
    return whole[expected.common(prompt, whole) :]


def test_generate_stops_where_training_stopped(family: Family, renderer: Renderer) -> None:
    """A policy gets the prompt's ids; where the answer changes the last of them (t5's prompt ends in a space, for
    example), with those before."""
    trained = rows_of(Demonstration(THREE_TURNS[:1], THREE_TURNS[1:2]), renderer, family)[0]
    begin = trained["loss_mask"].index(1)
    prompt = expected.prompt(family, THREE_TURNS[:1])[:begin]
    sampled = generated(family, prompt, continuation(family, prompt), renderer.turn_end.stop_ids)
    assert readable(family, sampled) == readable(family, trained["input_ids"][begin:])
    assert sampled == trained["input_ids"][begin:]
    assert sampled[-1] == renderer.turn_end.token_id


def test_generate_stops_at_all_that_generation_config_names(family: Family, renderer: Renderer) -> None:
    assert set(family.stop_ids) | {renderer.turn_end.token_id} == set(renderer.turn_end.stop_ids)
    answer = rows_of(Preference(user("?"), assistant("46"), assistant("no")), renderer, family)[0]["rejected_ids"][:-1]
    for stop in family.stop_ids:
        sampled = generated(
            family, expected.prompt(family, user("?")), [*answer, stop, *answer], renderer.turn_end.stop_ids
        )
        assert sampled == [*answer, stop]


def test_the_end_of_a_turn_is_the_token_that_the_template_writes(family: Family, renderer: Renderer) -> None:
    assert renderer.turn_end.token_id == family.ids(family.end or family.eos)[0]
