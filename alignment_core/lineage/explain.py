"""Why each stage of a run ran or was cached: the parts of its key that changed since the most similar earlier run of it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from alignment_core.artifacts import Provenance
from alignment_core.execution.cache_miss import changes, in_words, nearest
from alignment_core.journal import StageLine, short_id


class Explanation(BaseModel):
    """Why a stage of a run ran or was cached."""

    model_config = ConfigDict(frozen=True)

    label: str
    state: str
    """``run``, ``cached``, ``failed`` or ``running``."""
    why: str
    changed: tuple[str, ...] = ()
    """Every part of the key that differs from the nearest earlier run, as ``path: old → new``."""
    elsewhere: tuple[str, ...] = ()
    """Differences of hardware: not part of a key, but they change rounding."""
    nearest: str | None = None
    """Label and run of that earlier run."""
    key: str = ""
    seconds: float = 0.0
    reference: str | None = None


def explain(lines: Iterable[StageLine], records: Iterable[Provenance], run_id: str) -> list[Explanation]:
    """One explanation per stage, in the run's order. ``records`` are the store's records of these stages."""
    known = list(records)
    return [_explanation(line, known, run_id) for line in lines]


def _explanation(line: StageLine, records: list[Provenance], run_id: str) -> Explanation:
    shared = line.model_dump(include={"label", "state", "key", "seconds", "reference"})
    if line.state == "cached":
        maker = next((record for record in records if record.key == line.key), None)
        without_record = "same key as a record that no longer exists"
        reason = without_record if line.reason in ("", "same key") else line.reason  # made with other package versions
        why = f"same key as {_name(maker)}{_where(maker)}" if maker else reason
        return Explanation(**shared, why=why)
    earlier = [
        record
        for record in records
        if record.key != line.key and record.finished_at < line.at and record.run_ids.get("prefect") != run_id
    ]
    similar = nearest(line.key_parts, earlier, line.label)
    failure = f"; {line.reason}" if line.state == "failed" else ""
    if similar is None:
        return Explanation(**shared, why=f"no earlier run of this stage in this store{failure}")
    changed = tuple(in_words(changes(similar.key_parts, line.key_parts), line.label))
    record = next((record for record in records if record.key == line.key), None)
    both_known = record is not None and record.hardware and similar.hardware
    elsewhere = tuple(changes(similar.hardware, record.hardware)) if record and both_known else ()
    details = {"changed": changed, "elsewhere": elsewhere, "nearest": _name(similar)}
    return Explanation(**shared, why=f"changed since {_name(similar)}{failure}", **details)


def _name(record: Provenance) -> str:
    run = record.run_ids.get("prefect", "")
    return f"{record.label} of {record.finished_at[:19].replace('T', ' ')}" + (f", run {short_id(run)}" if run else "")


def _where(record: Provenance) -> str:
    """The hardware of a record: the same key may give other bytes on other hardware."""
    hardware = record.hardware
    processor = hardware.get("gpu") or hardware.get("cpu")
    ranks = f", {hardware['trainers']} trainers" if "trainers" in hardware else ""
    return f", made on {processor}{ranks}" if processor else ""
