"""The page of defaults beside those of TRL, OpenRLHF and publications. `make peers` compares the peers' columns with them."""

from __future__ import annotations

import re

import pytest
import yaml

from alignment_core.recipes import peer_defaults

TABLE = yaml.safe_load(peer_defaults.FILE.read_text())
WORDS = {"the paper of Online-RLHF", "its script"}


@pytest.mark.parametrize(
    ("field", "given", "value"),
    [
        ("dpo.loss.beta", {}, 0.1),  # Rafailov et al. 2023
        ("dpo.loss.beta", {"dpo.loss.loss_type": "simpo"}, 2.0),  # the README of princeton-nlp/SimPO
        ("dpo.training.learning_rate", {"dpo.loss.loss_type": "orpo"}, 8e-6),  # Hong et al. 2024
        ("rl.loss.epsilon", {"rl.loss.loss_type": "gspo"}, 3e-4),  # Zheng et al. 2025
    ],
)
def test_ours_is_the_default_of_the_place_and_of_other_fields(field: str, given: dict[str, str], value: float) -> None:
    assert peer_defaults.ours({"field": field, "with": given}, TABLE["recipes"]) == value


def test_every_publication_that_a_row_names_is_a_source() -> None:
    texts = [text for row in TABLE["rows"] for text in (row.get("published", ""), row["why"])]
    named = {name.strip() for text in texts for names in re.findall(r"\(([^)]*)\)", text) for name in names.split(",")}
    assert named <= TABLE["sources"].keys() | WORDS
    assert {name for name in TABLE["sources"] if not any(name in text for text in texts)} == set()


def test_every_row_says_why() -> None:
    assert [row["field"] for row in TABLE["rows"] if not row.get("why")] == []
    assert [row["field"] for row in TABLE["rows"] if not {"trl", "openrlhf", "published"} & row.keys()] == []
