"""Names for a recipe's ``model``: all that the store's commands accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import UserError
from alignment_core.recipes import ModelConfig
from alignment_core.stages.base_model import in_store, near_tags, pin_model


@pytest.fixture
def reference(store: Store, tmp_path: Path) -> Reference:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "weights").write_text("one")
    reference = store.publish(tmp_path / "one", "model")
    store.tags.move("policy/production", reference, None, reason="first")
    return reference


def test_a_model_is_named_by_tag_reference_or_the_first_digits_of_its_digest(store, reference):
    for name in ("policy/production", str(reference), reference.short, reference.digest[:8]):
        assert in_store(store, ModelConfig(name=name)) == reference
    assert in_store(store, ModelConfig(name="org/model")) is None


def test_unknown_digits_are_refused_without_a_request_to_the_hub(store, reference):
    wrong = "0" if reference.digest[0] != "0" else "1"
    for name in (wrong * 8, f"model@sha256:{wrong * 12}"):
        with pytest.raises(UserError, match=r"^model: .* has no artifact"):
            in_store(store, ModelConfig(name=name))


def test_a_tag_that_is_misspelled_is_suggested(store, reference):
    assert near_tags(store, ModelConfig(name="policy/prodution")) == " (did you mean the tag policy/production?)"
    assert near_tags(store, ModelConfig(name="org/model")) == ""


def test_a_revision_is_refused_for_models_that_are_not_on_the_hub(store, reference, tmp_path):
    with pytest.raises(
        UserError, match=r"^model.revision: policy/production is an artifact, and revisions are of models"
    ):
        in_store(store, ModelConfig(name="policy/production", revision="v2"))
    with pytest.raises(UserError, match="one is a folder, and revisions are of models on the Hub"):
        pin_model(ModelConfig(name=str(tmp_path / "one"), revision="v2"))
