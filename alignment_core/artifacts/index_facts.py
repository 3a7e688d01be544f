"""Searchable facts of a store's small objects, which an index keeps beside copies of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from alignment_core.artifacts.manifest import parse_manifest
from alignment_core.artifacts.paths import MANIFESTS, STAGES, parse_tag_path
from alignment_core.artifacts.provenance import Provenance, parse_record
from alignment_core.artifacts.read_sources import read_sources
from alignment_core.artifacts.reference import Reference
from alignment_core.artifacts.tag_history import parse_move
from alignment_core.errors import Corrupt

Facts = dict[tuple[str, str], str]
"""A note as JSON by kind of fact and value. An object that cannot be read has one fact, ``problem``, whose value is the
reason."""


@dataclass(frozen=True)
class Brief:
    """A stage record in short, which takes a tenth of the time to read."""

    key: str
    stage: str
    label: str
    run: str
    started_at: str
    finished_at: str
    seconds: float
    device_seconds: float
    inputs: dict[str, Reference]
    outputs: dict[str, Reference]

    @classmethod
    def of(cls, key: str, note: str) -> Brief:
        """The record with a key, from the note of that fact."""
        *fields, inputs, outputs = json.loads(note)
        parsed = ({name: _reference(text) for name, text in part.items()} for part in (inputs, outputs))
        return cls(key, *fields, *parsed)


@lru_cache(maxsize=1 << 16)
def _reference(text: str) -> Reference:
    return Reference.parse(text)


def facts_of(uri: str, path: str, data: bytes) -> Facts:
    """The facts of the object that the store ``uri`` has at ``path``."""
    try:
        if path.startswith(STAGES):
            return _of_record(parse_record(uri, path, data))
        if path.startswith(MANIFESTS):
            manifest = parse_manifest(uri, path, data)
            size = json.dumps([len(manifest.files), manifest.size])
            return {("artifact", str(manifest.reference)): size, ("kind", manifest.kind): ""}
        return {("tag", parse_move(uri, path, data).name): ""} if parse_tag_path(path) else {}
    except Corrupt as error:
        return {("problem", str(error)): ""}


def _is_searched(name: str, value: Any) -> bool:
    """Whether artifacts are found by a metric: by finite numbers, without intervals and counts beside them."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and "." not in name


def _of_record(record: Provenance) -> Facts:
    run = record.run_ids.get("prefect", "")
    cost = record.seconds, record.cost.get("device_seconds", 0.0)
    times = record.started_at, record.finished_at
    inputs, outputs = ({name: str(used) for name, used in part.items()} for part in (record.inputs, record.outputs))
    made = record.started_at, record.key, record.finished_at
    sources = read_sources(record.config)
    return {
        ("key", record.key): json.dumps([record.stage, record.label, run, *times, *cost, inputs, outputs]),
        ("stage", str(record.key_parts.get("stage"))): "",
        ("label", record.label): "",
        ("finished", record.finished_at): "",
        ("run", run): json.dumps(cost),
        **{("source", source.path): json.dumps(source[1:]) for source in sources},
        **{("metric", name): json.dumps(value) for name, value in record.metrics.items() if _is_searched(name, value)},
        **{("description", str(reference)): "" for reference in record.described_by.values()},
        **{("input", reference): "" for reference in inputs.values()},
        **{
            ("output", reference): json.dumps([*made, record.labels_of(_reference(reference))])
            for reference in outputs.values()
        },
    }
