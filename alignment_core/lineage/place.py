"""The place of a stage in a graph: the same in every round, night and branch."""

from __future__ import annotations

from alignment_core.artifacts import Provenance
from alignment_core.execution.cache_miss import any_round

Place = tuple[str, str]


def place_of(record: Provenance) -> Place:
    """The stage and what it is for, without its run's and its branch's part of the label, and without numbers of rounds."""
    return record.stage, any_round(record.label.rpartition("/")[2])
