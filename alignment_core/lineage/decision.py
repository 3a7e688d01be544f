"""Decisions about promotions, for and against: artifacts with the gates, what they measured, and what was compared."""

from __future__ import annotations

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.canonical import digest_of
from alignment_core.evaluation.gates import JudgedGate
from alignment_core.execution.environment import code

STAGE, KIND = "promote", "decision"
FILE = "decision.json"


class Decision(BaseModel):
    """Whether a policy may replace the artifact of a tag."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    tag: str
    policy: Reference
    previous: Reference | None
    """The artifact that the tag pointed to when the policies were compared."""
    passed: bool
    """Whether the policy may be promoted. The tag's history says whether it was: another run may have moved the tag since."""
    reasons: tuple[str, ...] = ()
    """Why not, in sentences."""
    gates: tuple[JudgedGate, ...] = ()
    """Empty if the policies could not be compared, too."""
    beside: str = ""
    """The policy that gates compare with, in words."""
    report: Reference | None = None
    """The evaluations of both policies."""
    run: str = ""
    """Id of the run that decided."""
    at: str = ""
    """When, ISO 8601 in UTC."""


def record(store: Store, decision: Decision) -> Reference:
    """Publish a decision, as made from its policies and evaluations. An attempt that resumes a run finds its own again."""
    identity = decision.model_dump(mode="json", include={"tag", "policy", "previous", "passed", "reasons", "run"})
    key = digest_of({"stage": STAGE, **identity})
    if (known := store.records.find(key)) is not None:
        return known.output
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    inputs = {"policy": decision.policy, "previous": decision.previous, "report": decision.report}
    draft = ProvenanceDraft(
        key=key,
        stage=STAGE,
        label="promotion",
        key_parts={"stage": STAGE, **identity},
        inputs={role: reference for role, reference in inputs.items() if reference is not None},
        config={"tag": decision.tag, "gates": [gate.model_dump(mode="json") for gate in decision.gates]},
        code_version=str(code()),
        started_at=now,
        finished_at=now,
        metrics={"passed": decision.passed},
        run_ids={"prefect": decision.run} if decision.run else {},
    )
    with store.workspace.scratch() as folder:
        text = decision.model_copy(update={"at": now}).model_dump_json(indent=1)
        (folder / FILE).write_text(f"{text}\n", encoding="utf-8")
        return store.publish(folder, KIND, draft)


def read(store: Store, reference: Reference) -> Decision:
    """A decision of a store. Raises NotFound or Corrupt."""
    return Decision.model_validate_json((store.fetch(reference) / FILE).read_bytes())
