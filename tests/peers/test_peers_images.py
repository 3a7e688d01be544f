"""Images of a row's column go into the places of messages into which TRL puts them."""

from __future__ import annotations

from typing import Any

import pytest
from trl.data_utils import prepare_multimodal_messages

from alignment_core.data.fields import Fields

Messages = list[dict[str, Any]]
IMAGES = ["a" * 64, "b" * 64]
PLACE, WORDS = {"type": "image"}, {"type": "text", "text": "and"}
SYSTEM, ANSWER = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "red"}
CASES: dict[str, Messages] = {
    "text": [SYSTEM, {"role": "user", "content": "Which?"}, ANSWER, {"role": "user", "content": "Sure?"}],
    "parts": [{"role": "user", "content": [WORDS, PLACE, WORDS, PLACE]}, ANSWER],
    "turns": [{"role": "user", "content": [PLACE, WORDS]}, ANSWER, {"role": "user", "content": [WORDS, PLACE]}],
}


def in_parts(messages: Messages) -> Messages:
    return [
        {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}
        for message in messages
        for content in [message["content"]]
    ]


@pytest.mark.parametrize("case", CASES)
def test_images_of_a_column_are_where_trl_puts_them(case: str) -> None:
    fields = Fields({"messages": CASES[case], "images": IMAGES}, {}, lambda image, name: str(image))
    theirs = prepare_multimodal_messages(CASES[case], [f"sha256:{image}" for image in IMAGES])
    assert in_parts(fields.messages("messages")) == theirs
    fields.check_images()


def test_as_many_parts_as_images_are_needed_as_by_trl() -> None:
    fields = Fields({"messages": CASES["parts"], "images": IMAGES[:1]}, {}, lambda image, name: str(image))
    for place in (lambda: fields.messages("messages"), lambda: prepare_multimodal_messages(CASES["parts"], IMAGES[:1])):
        with pytest.raises(ValueError, match="1"):
            place()
