"""The stage records behind artifacts, or made from them, as OpenLineage's events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.errors import AlignmentError
from alignment_core.execution.description import RECIPE, SETTINGS_FILE
from alignment_core.lineage.tree import Tree
from alignment_core.tracking.openlineage_events import of_record, to_json


def events_of(store: Store, trees: Iterable[Tree]) -> Iterator[str]:
    """A COMPLETE event of each record in some trees, as a line of JSON, the oldest first."""
    records = {record.key: record for tree in trees for node in tree.nodes.values() for record in node.made_by}
    names: dict[Reference, str] = {}
    for record in sorted(records.values(), key=_age):
        recipe = record.described_by.get(RECIPE)
        if recipe is not None and recipe not in names:
            names[recipe] = _name_of(store, recipe)
        yield to_json(of_record(store.uri, names[recipe] if recipe else "", record))


def _name_of(store: Store, recipe: Reference) -> str:
    """The name of a recipe; empty if its artifact is gone or of another version."""
    try:
        return str(json.loads((store.fetch(recipe) / SETTINGS_FILE).read_bytes())["name"])
    except (AlignmentError, OSError, ValueError, KeyError, TypeError):
        return ""


def _age(record: Provenance) -> tuple[str, str, str]:
    return record.finished_at, record.started_at, record.key
