"""`completion_only_loss: false`: as in TRL 1.16, whose labels are then the input ids, so that all tokens but the first have a
loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from alignment_core.data.build import BuiltDataset
from alignment_core.errors import UserError
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.recipes.sections.data import DataConfig

Build = Callable[..., BuiltDataset]
BOTH = {"completion_only_loss": False}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row_of(data: BuiltDataset) -> dict[str, Any]:
    (row,) = data.train.to_pylist()
    return row


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What?", "completion": "That."},
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}],
            "completion": [{"role": "assistant", "content": "That."}],
        },
    ],
    ids=["text", "messages"],
)
def test_all_tokens_but_the_first_are_trained(row: dict[str, Any], built: Build, tmp_path: Path) -> None:
    """The ids are those of ``apply_chat_template``, of which TRL makes the labels."""
    made = row_of(built(write(tmp_path, row), "demonstrations", chat_template=CHATML, **BOTH))
    if isinstance(row["prompt"], str):
        row = {
            "prompt": [{"role": "user", "content": "What?"}],
            "completion": [{"role": "assistant", "content": "That."}],
        }
    messages = [*row["prompt"], *row["completion"]]
    expected = byte_tokenizer(CHATML).apply_chat_template(messages, return_dict=False)
    assert made["input_ids"] == expected
    assert made["loss_mask"] == [0] + [1] * (len(expected) - 1)
    alone = row_of(built(write(tmp_path, row), "demonstrations", chat_template=CHATML))
    assert (alone["input_ids"], sum(alone["loss_mask"])) == (expected, len("That.") + 1)


def test_the_prompt_is_truncated_as_without_it(built: Build, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a" * 50, "completion": "b" * 10})
    limits = {"max_prompt_length": 20, "overlong": "truncate", "chat_template": CHATML}
    both, alone = (row_of(built(path, "demonstrations", **limits, **fields)) for fields in (BOTH, {}))
    assert both["input_ids"] == alone["input_ids"]
    assert both["loss_mask"] == [0] + [1] * (len(both["input_ids"]) - 1)
    assert alone["loss_mask"].index(1) == 20


def test_conversations_and_texts_are_trained_as_before(built: Build, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for row in ({"messages": chat}, {"text": "abc"}):
        path = write(tmp_path, row)
        masks = [row_of(built(path, "demonstrations", **fields))["loss_mask"] for fields in (BOTH, {})]
        assert masks[0] == masks[1]


def test_a_turn_with_the_weight_0_is_refused(built: Build, tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": "b", "weight": 0}, {"role": "user", "content": "c"}]
    completion = [*turns, {"role": "assistant", "content": "d"}]
    path = write(tmp_path, {"prompt": [{"role": "user", "content": "a"}], "completion": completion})
    with pytest.raises(UserError, match=r"rows.jsonl:1: a turn with the weight 0 is never trained on"):
        built(path, "demonstrations", **BOTH)


@pytest.mark.parametrize("kind", ["preferences", "prompts", "unpaired"])
def test_other_kinds_of_rows_refuse_it(kind: str, built: Build, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"completion_only_loss: has no effect on .*: leave it out"):
        built(write(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"}), kind, **BOTH)


def test_it_contradicts_training_on_the_last_turn_alone() -> None:
    with pytest.raises(ValidationError, match=r"`assistant_turns: last` on nothing before it: remove one of them"):
        DataConfig.model_validate({"path": "rows.jsonl", "assistant_turns": "last", **BOTH})


def test_data_sets_without_it_have_the_keys_of_earlier_versions() -> None:
    assert "completion_only_loss" not in DataConfig.model_validate("rows.jsonl").model_dump()
