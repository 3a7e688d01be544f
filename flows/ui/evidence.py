"""What is known of the lanes on a page beside their stages: records, evaluations and decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from alignment.flows.ui.lanes import Ancestry, Lane
from alignment_core.artifacts import Provenance, Reference
from alignment_core.artifacts.index import View
from alignment_core.artifacts.index_facts import Brief
from alignment_core.evaluation.metric_names import METRICS
from alignment_core.execution.base import shows_of
from alignment_core.host.progress_log import headline
from alignment_core.lineage.decision import Decision

EVIDENCE = ("accuracy", "reward", "win_rate", "judged_win_rate", "kl")
"""Metrics of an evaluation that its card shows."""


@dataclass(frozen=True)
class Measure:
    """A metric of an evaluation beside that of the baseline."""

    title: str
    value: float
    low: float | None
    high: float | None
    gain: float | None


@dataclass(frozen=True)
class Evidence:
    """An evaluation of a lane's model."""

    record: Provenance
    count: int | None
    """Number of prompts."""
    measures: list[Measure]


@dataclass(frozen=True)
class Shown:
    """The records of the lanes that a page shows, and what is known beside them."""

    records: dict[str, Provenance]
    evidence: dict[int, Evidence]
    """By the identity of a lane."""
    decisions: dict[Reference, Decision]
    """Those that the moves of tags to its models followed."""

    def evidence_of(self, lane: Lane) -> Evidence | None:
        return self.evidence.get(id(lane))

    def figure(self, brief: Brief) -> str:
        """The line that stands for a stage."""
        record = self.records.get(brief.key)
        return figure(record) if record else ""


def figure(record: Provenance) -> str:
    """The line that stands for a stage: its key metrics, at its start and at its end."""
    shows = shows_of(record.stage)
    return headline(
        shows, {name: value for name, value in record.metrics.items() if isinstance(value, (int, float, str))}
    )


def records_of(view: View, ancestors: Ancestry) -> tuple[dict[str, Provenance], dict[int, Evidence]]:
    """The whole records of the lanes that are shown, and their evaluations beside the first one."""
    lanes = [lane for lane in ancestors.lanes if not lane.left_out]
    briefs = [brief for lane in lanes for brief in (*lane.steps, *lane.data, *lane.again, *lane.evaluations[:1])]
    records = view.by_key([brief.key for brief in briefs])
    evaluated = [(lane, records[lane.evaluations[0].key]) for lane in lanes if lane.evaluations]
    baseline = evaluated[0][1].metrics if evaluated else {}
    evidence = {id(lane): _evidence(lane, record, baseline) for lane, record in evaluated}
    return records, evidence


def _evidence(lane: Lane, record: Provenance, baseline: dict[str, Any]) -> Evidence:
    metrics = record.metrics
    measures = []
    for name in EVIDENCE:
        value, before = metrics.get(name), baseline.get(name)
        if isinstance(value, (int, float)):
            is_baseline = metrics is baseline
            gain = value - before if isinstance(before, (int, float)) and not is_baseline else None
            measures.append(
                Measure(METRICS[name].label, value, metrics.get(f"{name}.low"), metrics.get(f"{name}.high"), gain)
            )
    counts = [metrics[f"{name}.n"] for name in EVIDENCE if f"{name}.n" in metrics]
    return Evidence(record, int(counts[0]) if counts else None, measures)
