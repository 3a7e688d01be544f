"""Completions that were sampled: the trained tokens are the sampled ones, whatever the template makes of their text."""

from __future__ import annotations

import pytest

from alignment_core.data.completion_text import CompletionText
from alignment_core.data.kinds.sampled import Completion
from alignment_core.data.messages import user
from alignment_core.data.template import Renderer
from tests.rendering.families import Family
from tests.rendering.rows import readable, rows_of


@pytest.mark.parametrize("text", ["46", " 46\n", "12 + 34\n</think>\n\n46", "<think>\n</think>46"])
def test_the_targets_are_the_sampled_tokens(family: Family, renderer: Renderer, text: str) -> None:
    """Qwen 3 writes empty thoughts before an answer, gpt-oss a channel, and Llama 3 strips it."""
    sampled = [*renderer.encode(text), renderer.turn_end.token_id]
    shown = CompletionText(family.tokenizer, renderer.turn_end)(sampled, "stop")
    (row,) = rows_of(Completion(user("12 + 34? [good=1]"), shown, sampled), renderer, family)
    prompt, _ = renderer.prompt(user("12 + 34? [good=1]"))
    assert readable(family, row["input_ids"]) == readable(family, prompt + sampled)
    assert row["loss_mask"] == [0] * len(prompt) + [1] * len(sampled)
    assert row["text"] == renderer.prompt(user("12 + 34? [good=1]"))[1] + renderer.decode(sampled)


def test_a_stop_text_and_special_tokens_are_targets_and_no_end_follows(family: Family, renderer: Renderer) -> None:
    end = renderer.turn_end.token_id
    sampled = [*renderer.encode("46"), end, *renderer.encode("47###")]
    (row,) = rows_of(Completion(user("12 + 34?"), "46 47###", sampled), renderer, family)
    assert row["input_ids"][-len(sampled) :] == sampled
    assert sum(row["loss_mask"]) == len(sampled)
