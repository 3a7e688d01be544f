"""`kto` from completions with a thumb up or down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment_core.data.fields import Fields
from alignment_core.starting.base import Facts, Start
from alignment_core.starting.guess import Reading
from alignment_core.starting.sections import data, evaluation, training
from alignment_core.starting.text import Said


def sections(facts: Facts) -> dict[str, Any]:
    loss = {"beta": Said(0.1, "the lower, the further the policy may move")}
    section = {"data": data(facts), "loss": loss, "training": training(facts, 1e-6, 2e-4)}
    return {"kto": section, **evaluation(facts, verifier=False)}


def fits(rows: Sequence[Mapping[str, Any]], found: Reading) -> bool:
    """Thumbs both up and down: where all are up, they are demonstrations that somebody chose."""
    return len({str(Fields(row, found.columns).value("label")).lower() for row in rows}) > 1


START = Start(("unpaired",), sections, "answers with a thumb up or down each", 30, ("unpaired",), fits)
