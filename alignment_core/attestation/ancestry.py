"""The ancestry of an artifact: artifacts, the stages that made them, and their sources outside the store, each once."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.lineage import Graph, Source
from alignment_core.lineage.sources import sources_of

_WEIGHTS = re.compile(r"model(-\d+)?|policy|base|adapter")
"""Roles of the inputs that a stage trains further or merges. Reward models, teachers and references have other roles."""
Inputs = Mapping[str, Reference]


@dataclass(frozen=True)
class Ancestor:
    """An artifact with the stage that made it."""

    reference: Reference
    path: str
    """The roles on the shortest path to it, such as ``policy/train``; empty for the first artifact."""
    record: Provenance | None
    """Record of the stage that made it; the latest, if several made the same bytes; None for an import."""

    @property
    def reads_data(self) -> bool:
        """Whether its stage reads data from outside the store; otherwise it reads models."""
        return self.record is not None and self.record.stage == "dataset"

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources outside the store that its stage read."""
        return sources_of(self.record) if self.record else ()


@dataclass(frozen=True)
class Ancestry:
    """An artifact and everything that it was made from."""

    all: tuple[Ancestor, ...]
    """The artifact itself first, then its ancestors from the nearest to the farthest."""
    weights: tuple[Ancestor, ...]
    """A model itself, then those of its ancestors whose weights were trained or merged to its own, the nearest first."""
    measured: dict[str, float]
    """Metrics of the latest evaluation of it; empty if there was none."""

    @property
    def artifact(self) -> Ancestor:
        return self.all[0]

    @property
    def earlier(self) -> tuple[Ancestor, ...]:
        """All but the artifact itself."""
        return self.all[1:]

    def on_hub(self, data: bool) -> tuple[tuple[str, str], ...]:
        """Names and commits of the data sets or models that were read from the Hub for it, the nearest first."""
        return _on_hub(ancestor for ancestor in self.all if ancestor.reads_data == data)

    def base_models(self) -> tuple[tuple[str, str], ...]:
        """Names and commits of the models on the Hub whose weights were trained or merged to its own, the nearest first."""
        return _on_hub(self.weights)


def _on_hub(ancestors: Iterable[Ancestor]) -> tuple[tuple[str, str], ...]:
    sources = (source for ancestor in ancestors for source in ancestor.sources)
    return tuple(dict.fromkeys((source.path, source.commit) for source in sources if source.commit))


def ancestry_of(store: Store, reference: Reference) -> Ancestry:
    """The ancestry by the store's records alone. Raises NotFound if there is no such artifact."""
    store.manifest(reference)
    with Graph.of(store) as graph:
        return Ancestry(
            tuple(_walk(graph, reference, _all_inputs)),
            tuple(_walk(graph, reference, _weights)),
            _evaluation(graph, reference),
        )


def _all_inputs(_: Reference, record: Provenance) -> Inputs:
    return record.inputs


def _weights(made: Reference, record: Provenance) -> Inputs:
    """The inputs whose weights the stage trained or merged to those of the model ``made``."""
    if made.kind == "critic" and "critic" in record.inputs:
        return {"critic": record.inputs["critic"]}
    return {role: used for role, used in record.inputs.items() if _WEIGHTS.fullmatch(role)}


def _walk(graph: Graph, reference: Reference, inputs: Callable[[Reference, Provenance], Inputs]) -> Iterator[Ancestor]:
    waiting, seen = deque([(reference, "")]), {reference}
    while waiting:
        ancestor, path = waiting.popleft()
        record = _latest(graph.made_by(ancestor))
        yield Ancestor(ancestor, path, record)
        for role, used in sorted(inputs(ancestor, record).items()) if record else ():
            if used not in seen:
                seen.add(used)
                waiting.append((used, f"{path}/{role}" if path else role))


def _latest(records: Sequence[Provenance]) -> Provenance | None:
    return max(records, key=lambda record: (record.finished_at, record.key), default=None)


def _evaluation(graph: Graph, reference: Reference) -> dict[str, float]:
    """The metrics of the stage ``evaluate``: samples of the policy, scored on held-out prompts."""
    evaluations = [
        evaluated
        for sampled in _users(graph, [reference], "policy", "generate")
        for scored in _users(graph, sampled.outputs.values(), "rollouts", "score")
        for evaluated in _users(graph, scored.outputs.values(), "scores", "evaluate")
    ]
    latest = _latest(evaluations)
    return numbers(latest.metrics) if latest else {}


def _users(graph: Graph, references: Any, role: str, stage: str) -> Iterator[Provenance]:
    for reference in references:
        for used_as, record in graph.used_by(reference):
            if used_as == role and record.stage == stage:
                yield record


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {
        name: value
        for name, value in sorted(metrics.items())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
