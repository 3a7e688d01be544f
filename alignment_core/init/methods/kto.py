"""`kto` from completions with a thumb up or down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.init.base import Profile, Start
from alignment_core.init.guess import ColumnMapping
from alignment_core.init.sections import data, evaluation, training
from alignment_core.init.text import Said


def sections(facts: Profile) -> dict[str, Any]:
    loss = {"beta": Said(0.1, "the lower, the further the policy may move")}
    section = {"data": data(facts), "loss": loss, "training": training(facts, 1e-6, 2e-4)}
    return {"kto": section, **evaluation(facts, verifier=False)}


def fits(rows: Sequence[Mapping[str, Any]], found: ColumnMapping) -> bool:
    """Thumbs both up and down: where all are up, they are demonstrations that somebody chose."""
    return len({str(Fields(row, found.columns).value("label")).lower() for row in rows}) > 1


START = Start(("unpaired",), sections, "answers with a thumb up or down each", 30, ("unpaired",), fits)
