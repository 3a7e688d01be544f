"""OpenLineage's events about stages: https://openlineage.io/spec/2-0-2/OpenLineage.json.

A stage is a job in the namespace of its recipe's name; artifacts are datasets in the namespace of their store's address. The
package `openlineage-python` is imported with this module: see :func:`alignment_core.tracking.trackers.require_package`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    JobFacet,
    RunFacet,
    documentation_job,
    error_message_run,
    job_type_job,
    parent_run,
    processing_engine_run,
)
from openlineage.client.serde import Serde

from alignment_core.artifacts import Provenance, Reference
from alignment_core.credentials import cut
from alignment_core.execution.environment import code
from alignment_core.tracking.listener import numbers

PRODUCER = "urn:alignment:run-host:v1"
FACET = "alignment_stage"
"""Name of the facet of our own, with what records have beyond OpenLineage's facets."""
NO_RECIPE = "alignment"
"""Namespace of stages whose recipe is unknown."""
EPOCH = "1970-01-01T00:00:00+00:00"
"""Time of events about records without a time."""


@dataclass(frozen=True)
class StageJob:
    """A stage as a job, and its run. ``recipe`` is the recipe's name, ``run`` the id of the recipe's run, and ``attempt``
    that of an attempt of it; empty where they are unknown."""

    store: str
    recipe: str
    stage: str
    label: str
    key: str
    run: str
    attempt: str
    inputs: Mapping[str, Reference]
    version: str
    """Version of the code."""

    @property
    def run_id(self) -> str:
        """A UUID that follows from the attempt, the label and the key."""
        return str(uuid5(NAMESPACE_URL, f"urn:alignment:stage:{json.dumps([self.attempt, self.label, self.key])}"))

    def event(
        self,
        state: str,
        at: str,
        facet: Mapping[str, Any],
        outputs: Iterable[Reference] = (),
        error: str | None = None,
    ) -> RunEvent:
        """An event, such as ``START``, without secrets. ``facet`` has fields of our own; ``error`` says why a run failed."""
        run_facets: dict[str, RunFacet] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
                version=self.version or "unknown", name="alignment", producer=PRODUCER
            ),
            FACET: RunFacet(producer=PRODUCER).with_additional_properties(
                **cut({"stage": self.stage, "key": self.key, **facet})
            ),
        }
        if _is_uuid(self.run):
            parent = parent_run.ParentRunFacet(
                run=parent_run.Run(runId=self.run), job=parent_run.Job(self._namespace, "run"), producer=PRODUCER
            )
            run_facets["parent"] = parent
        if error is not None:
            run_facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                message=cut(error), programmingLanguage="Python", producer=PRODUCER
            )
        job_facets: dict[str, JobFacet] = {
            "documentation": documentation_job.DocumentationJobFacet(
                description=f"Stage {self.stage} of the package alignment", producer=PRODUCER
            ),
            "jobType": job_type_job.JobTypeJobFacet("BATCH", "ALIGNMENT", "STAGE", producer=PRODUCER),
        }
        store = cut(self.store)
        return RunEvent(
            eventType=RunState(state),
            eventTime=at,
            run=Run(self.run_id, run_facets),
            job=Job(self._namespace, cut(self.label), job_facets),
            inputs=[InputDataset(store, str(used)) for used in dict.fromkeys(self.inputs.values())],
            outputs=[OutputDataset(store, str(made)) for made in dict.fromkeys(outputs)],
            producer=PRODUCER,
        )

    @property
    def _namespace(self) -> str:
        return self.recipe or NO_RECIPE


def of_record(store: str, recipe: str, record: Provenance) -> RunEvent:
    """The COMPLETE event of a stage's record, with the run id of the events that its run sent, if it sent any."""
    run = record.run_ids.get("prefect", "")
    job = StageJob(
        store,
        recipe,
        record.stage,
        record.label,
        record.key,
        run,
        record.run_ids.get("openlineage", run),
        record.inputs,
        record.code_version,
    )
    at = record.finished_at or record.started_at or EPOCH
    facet = {"cached": False, "seconds": record.seconds, "seed": record.seed, **measured(record.metrics, record.cost)}
    return job.event("COMPLETE", at if "T" in at else f"{at}T00:00:00+00:00", facet, record.outputs.values())


def measured(metrics: Mapping[str, Any], cost: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The finite numbers among metrics and cost: JSON has no others."""
    return {
        name: {key: value for key, value in numbers(values) if math.isfinite(value)}
        for name, values in (("metrics", metrics), ("cost", cost))
    }


def to_json(event: RunEvent) -> str:
    """An event as one line of JSON."""
    return Serde.to_json(event)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def version() -> str:
    """The version of this code."""
    return str(code())


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
