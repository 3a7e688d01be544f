"""What a source touched: the artifacts made from a file, a Hub name or a row of it, and the tags that named them."""

from __future__ import annotations

import difflib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.artifacts.index import View
from alignment_core.artifacts.paths import STAGES, TAGS
from alignment_core.artifacts.tag_history import TagMove
from alignment_core.data.rows_file import ROWS
from alignment_core.errors import StoreError, UnknownName

FIRST_KINDS = ("model", "reward-model", "critic", "dataset")
"""Kinds in the order in which they are listed; all others follow by name."""
_TABLES = ("train.parquet", "test.parquet")


class TouchedTag(BaseModel):
    """A tag that pointed to an artifact."""

    tag: str
    moves: list[int]
    now: bool
    """Whether it does now."""


class Touched(BaseModel):
    """An artifact that a source touched."""

    reference: Reference
    made_by: list[str]
    """Labels of its stages."""
    made_at: str
    run: str
    tags: list[TouchedTag] = []


class Touch(BaseModel):
    """Everything that some sources touched."""

    sources: dict[str, list[str]]
    """Digests or versions, by path or name."""
    without_row: list[Reference] = []
    """Data sets that read a source, but do not have the row."""
    unknown: list[Reference] = []
    """Artifacts that were pruned, cannot be read, or hold no rows, so that they count as if they had the row."""
    artifacts: list[Touched]
    """Those that a tag names now come first, then those that one named, then models, and so on."""


def touched(store: Store, source: str, row: str | None = None) -> Touch:
    """Everything that stages made from a source: a part of its path or name, or the beginning of its digest or commit.

    With ``row``, a text of it, only what was made from data sets that have the text. Raises UnknownName if no stage read such a
    source.
    """
    moves: defaultdict[Reference, list[TagMove]] = defaultdict(list)
    present: dict[str, Reference] = {}
    with store.index.view(TAGS) as of_tags:
        for move in of_tags.moves():
            moves[move.to].append(move)
            present[move.name] = move.to
    with store.index.view(STAGES) as view:
        matches = view.sources(source)
        if not matches:
            known = list(view.sources())
            near = difflib.get_close_matches(source, known, n=3, cutoff=0.3) or known[:3]
            raise UnknownName(
                f"no stage of {store.uri} read {source!r}; sources are {', '.join(near) or 'none so far'}"
            )
        read = dict.fromkeys(output for record in view.readers(*matches) for output in record.outputs.values())
        having, without, unknown = _having(store, list(read), row)
        reached = set(having).union(*map(view.descendants, having))
        artifacts = [_touched(view, reference, moves[reference], present) for reference in reached]
    return Touch(
        sources={path: [digest or version for digest, version in pins] for path, pins in matches.items()},
        without_row=without,
        unknown=unknown,
        artifacts=sorted(artifacts, key=_order),
    )


def _having(
    store: Store, references: list[Reference], row: str | None
) -> tuple[list[Reference], list[Reference], list[Reference]]:
    """Those that have the row or may have it, those that do not have it, and those that may have it."""
    if row is None:
        return references, [], []
    having: list[Reference] = []
    without: list[Reference] = []
    unknown: list[Reference] = []
    for reference in references:
        has_row = _has(store, reference, row)
        (without if has_row is False else having).append(reference)
        if has_row is None:
            unknown.append(reference)
    return having, without, unknown


def _has(store: Store, reference: Reference, row: str) -> bool | None:
    """Whether a data set has a text; None if it is pruned or cannot be read, or is none of rows."""
    try:
        names = {entry.path for entry in store.manifest(reference).files}
        if store.is_pruned(reference) or not names & {*_TABLES, ROWS}:
            return None
        return any(row in text for text in _texts(store.fetch(reference)))
    except (StoreError, OSError, ValueError):
        return None


def _texts(folder: Path) -> Iterator[str]:
    """All texts of a data set's rows."""
    import pyarrow.parquet as pq
    import pyarrow.types as types

    for name in _TABLES:
        if (folder / name).is_file():
            file = pq.ParquetFile(folder / name)
            columns = [field.name for field in file.schema_arrow if types.is_string(field.type)]
            for batch in file.iter_batches(columns=columns):
                for column in batch.columns:
                    yield from filter(None, column.to_pylist())
    if (folder / ROWS).is_file():
        with (folder / ROWS).open(encoding="utf-8") as lines:
            for line in lines:
                yield from _strings(json.loads(line))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _touched(view: View, reference: Reference, moves: list[TagMove], present: dict[str, Reference]) -> Touched:
    makers: list[Provenance] = sorted(view.makers(reference), key=lambda record: record.finished_at)
    by_tag: dict[str, list[int]] = defaultdict(list)
    for move in moves:
        by_tag[move.name].append(move.number)
    return Touched(
        reference=reference,
        made_by=[label for record in makers for label in record.labels_of(reference)],
        made_at=makers[-1].finished_at if makers else "",
        run=makers[-1].run_ids.get("prefect", "") if makers else "",
        tags=[TouchedTag(tag=tag, moves=on, now=present.get(tag) == reference) for tag, on in by_tag.items()],
    )


def _order(artifact: Touched) -> tuple[bool, bool, int, str, str, Reference]:
    kind = artifact.reference.kind
    place = FIRST_KINDS.index(kind) if kind in FIRST_KINDS else len(FIRST_KINDS)
    named_now = any(tag.now for tag in artifact.tags)
    return not named_now, not artifact.tags, place, kind, artifact.made_at, artifact.reference
