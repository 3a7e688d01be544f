"""The text of a sampled answer, which verifiers compare with a label and reward models read, is the content of its message."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alignment_core.artifacts.reference import Reference
from alignment_core.data.completion_text import CompletionText
from alignment_core.data.kinds.unpaired import Labelled
from alignment_core.data.messages import assistant, user
from alignment_core.data.template import Renderer
from alignment_core.inference.decoding import Decoding
from alignment_core.models.model_ref import Model
from tests.rendering import expected
from tests.rendering.families import Family
from tests.rendering.installed import FAMILIES
from tests.rendering.rows import readable, rows_of

QUESTION = user("Who are you?")
ANSWERS = ["Paris", "I am fine, thanks.\n\nWe go."]
CASES = [(family, answer) for family in FAMILIES for answer in ANSWERS if family.keeps_spaces or answer == "Paris"]
WRITTEN_BEFORE = {
    "gpt-oss": "final",  # the name of the channel, between special tokens
    "trl-gptoss": "final",
    "trl-muse_glimmer": " to=user",
    "trl-qwen3": "<think>\n\n</think>\n\n",
    "trl-qwen3_training": "<think>\n\n</think>\n\n",
    "trl-qwen3_5_think_training": "\n\n</think>\n\n",
    "trl-qwen3_6": "\n\n</think>\n\n",
    "trl-qwen3_8": "\n\n</think>\n\n",
}
"""Text of an assistant's turn that the template writes before the content."""
AS_THEY_ARE = [(family, answer) for family, answer in CASES if family.name not in (*WRITTEN_BEFORE, "albert")]


@pytest.mark.parametrize(("family", "content"), CASES, ids=str)
def test_an_answer_reads_as_its_content(family: Family, renderer: Renderer, content: str) -> None:
    """Also where the template writes white space around it."""
    ids = expected.last_turn(family, [*QUESTION, *assistant(content)]).turns[0]
    right = content.lower() if family.name == "albert" else content  # its tokenizer has no capitals
    text = CompletionText(family.tokenizer, renderer.turn_end)(ids, "stop")
    assert text == WRITTEN_BEFORE.get(family.name, "") + right


@pytest.mark.parametrize(("family", "content"), AS_THEY_ARE, ids=str)
def test_a_reward_model_reads_the_ids_that_the_policy_sampled(family: Family, renderer: Renderer, content: str) -> None:
    """It has the policy's template and tokenizer here, and renders question and text again."""
    right = expected.last_turn(family, [*QUESTION, *assistant(content)])
    text = CompletionText(family.tokenizer, renderer.turn_end)(right.turns[0], "stop")
    (row,) = rows_of(Labelled(QUESTION, assistant(text), True), renderer, family)
    assert readable(family, row["prompt_ids"] + row["completion_ids"]) == readable(family, right.ids)


def test_the_process_that_samples_decodes_as_the_stage_does(family: Family, renderer: Renderer, tmp_path: Path) -> None:
    """It reads the tokenizer from the policy's folder."""
    family.tokenizer.save_pretrained(tmp_path)
    model = Model(tmp_path, Reference.parse(f"model@sha256:{'0' * 64}"))
    whole = np.array(expected.last_turn(family, [*QUESTION, *assistant(ANSWERS[0])]).turns[0], np.int32)
    for ids, reason in ((whole, "stop"), (whole[:-1], "length"), (whole[:0], "length")):
        texts = Decoding(model, renderer.turn_end, keeps_special=True)(ids, reason)
        for text, skips in ((texts.plain, True), (texts.special, False)):
            assert text == CompletionText(family.tokenizer, renderer.turn_end, skips)(ids, reason)
    assert Decoding(model, renderer.turn_end)(whole, "stop").special is None
