"""Tokenizers are compared by their encodings, and not by the form of their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import UserError
from alignment_core.models.model_ref import Model
from alignment_core.models.same_tokenizer import check_same_tokenizer, difference
from alignment_core.models.tokenizer import byte_tokenizer
from alignment_core.rewards.scoring_actors import check_tokenizer, has_another_tokenizer


def saved(folder: Path, change: Callable[[Any], Any] = lambda _: None) -> Path:
    tokenizer = byte_tokenizer()
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    return folder


def truncated(tokenizer: Any) -> None:
    """Calls with truncation and padding leave them in the tokenizer that is saved."""
    tokenizer("a text", truncation=True, max_length=2, padding="max_length")


def reordered(file: Path) -> None:
    content = json.loads(file.read_text())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    file.write_text(json.dumps(dict(reversed(content.items())), ensure_ascii=False))


def test_the_order_of_a_files_entries_does_not_change_the_tokenizer(tmp_path):
    first, second = saved(tmp_path / "one"), saved(tmp_path / "other")
    reordered(second / "tokenizer.json")
    assert (first / "tokenizer.json").read_bytes() != (second / "tokenizer.json").read_bytes()
    assert difference(first, second) is None


@pytest.mark.parametrize(
    "change",
    [
        truncated,
        lambda tokenizer: setattr(tokenizer, "pad_token", "<unused0>"),
        lambda tokenizer: setattr(tokenizer, "chat_template", "another"),
    ],
    ids=["truncation and padding", "padding token", "template"],
)
def test_settings_that_change_no_token_do_not_change_the_tokenizer(change, tmp_path):
    assert difference(saved(tmp_path / "one"), saved(tmp_path / "other", change)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tokenizer: tokenizer.add_tokens(["<call>"]),
            "the token '<call>' is 264 in one and missing in the other",
        ),
        (
            lambda tokenizer: setattr(tokenizer.backend_tokenizer, "normalizer", normalizers.Lowercase()),
            "one encodes .*The quick brown",
        ),
        (
            lambda tokenizer: setattr(
                tokenizer.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)
            ),
            "one encodes '.+' in .* tokens and the other in .* others",
        ),
    ],
    ids=["a token more", "a normaliser", "a space before text"],
)
def test_tokenizers_with_different_encodings_differ(change, says, tmp_path):
    import re

    clause = difference(saved(tmp_path / "one"), saved(tmp_path / "other", change))
    assert clause is not None
    assert re.match(says, clause)


def test_a_file_that_cannot_be_read_is_named_as_such(tmp_path):
    (saved(tmp_path / "other") / "tokenizer.json").write_text("{")
    assert "one of them cannot be read" in str(difference(saved(tmp_path / "one"), tmp_path / "other"))


def test_artifacts_are_compared_in_the_same_way(store: Store, tmp_path):
    folders = [
        saved(tmp_path / "one"),
        saved(tmp_path / "two"),
        saved(tmp_path / "three", lambda tokenizer: tokenizer.add_tokens(["x y"])),
    ]
    reordered(folders[1] / "tokenizer.json")
    base, policy, other = (store.publish(folder, "model") for folder in folders)
    check_same_tokenizer(store, base, policy, "models.a", "leave it out")
    with pytest.raises(
        UserError, match=r"models\.a .* has another tokenizer than .*: the token 'x y' is 264 in .*; leave it out"
    ):
        check_same_tokenizer(store, base, other, "models.a", "leave it out")


def model(folder: Path) -> Model:
    return Model(folder, Reference("model", "a" * 64))


def not_special(tokenizer: Any) -> None:
    """<user> as an ordinary added token, which decoding does not leave out."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] != "<user>" and token["special"]
    tokenizer._tokenizer = tokenizer.backend_tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize(
    "change",
    [not_special, lambda tokenizer: setattr(tokenizer, "clean_up_tokenization_spaces", True), truncated],
    ids=["special or not", "spaces before full stops", "truncation"],
)
def test_models_with_the_same_tokens_and_other_decoders_are_compatible(change, tmp_path):
    """A reward model or a reference gets token ids: decoding does not matter."""
    folder = saved(tmp_path / "other", change)
    assert not has_another_tokenizer(model(folder), byte_tokenizer())
    ids = byte_tokenizer()("Hello <user> there , you .")["input_ids"]
    text = byte_tokenizer().decode(ids, skip_special_tokens=True)
    check_tokenizer(model(folder), "reference", [{"completion_ids": ids, "completion_text": text}])


def test_a_character_split_by_a_special_token_is_decoded_the_same(tmp_path):
    """An untrained policy samples such bytes; its text, without special tokens, has the character."""
    policy, ids = byte_tokenizer(), [*"é".encode()[:1], 256, *"é".encode()[1:]]
    text = policy.decode(ids, skip_special_tokens=True)
    assert text == "é"
    rows = [{"completion_ids": ids, "completion_text": text}]
    check_tokenizer(model(saved(tmp_path / "other")), "reference", rows)


def test_a_model_whose_ids_are_other_tokens_is_refused(tmp_path):
    folder = saved(tmp_path / "other")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert has_another_tokenizer(model(folder), byte_tokenizer())
    rows = [{"completion_ids": list(b"abba"), "completion_text": "abba"}]
    with pytest.raises(UserError, match="the reference has another tokenizer than the policy: it reads 'baab' where"):
        check_tokenizer(model(folder), "reference", rows)
