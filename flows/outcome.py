"""The outcome of a run whose stages are done: promotion, publication, report, and the JSON object that is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.client.orchestration import get_client
from pydantic import BaseModel

from alignment.flows.comparison import Compared, measured_in_training
from alignment.flows.costs import run_cost
from alignment.flows.run_page import leave_report, leave_tables, only_shown
from alignment.flows.stale_runs import close_not_begun
from alignment.tasks.promotion import promote, publish
from alignment.tasks.stage import Run
from alignment_core.artifacts import Reference
from alignment_core.composition.graph import Input, failure
from alignment_core.composition.results import Outputs
from alignment_core.execution.base import StageResult
from alignment_core.recipes import BaseRecipe, PromotionConfig
from alignment_core.reporting.run_report import policies_of


class Outcome(BaseModel):
    """Outcome of a run: the JSON object that ``align run --json`` prints last."""

    status: str
    run_id: str
    store: str
    stages: list[StageResult] = []
    outputs: dict[str, str] = {}
    cost: dict[str, float] = {}
    """Sums over the stages that ran; see :mod:`alignment_core.execution.cost`."""
    metrics: dict[str, Any] = {}
    promotion: dict[str, Any] | None = None
    night: dict[str, Any] | None = None
    given_up: list[dict[str, Any]] = []
    """Entries of the ledger of nights for rows that this night gave up."""
    failed: dict[str, str] = {}
    """Errors of stages that failed without ending the run, by label; the status is then ``partly failed``."""
    report: str | None = None
    """Path of the run's report as Markdown; an HTML page with the same content lies beside it."""
    error: str | None = None


def outcome_of(
    recipe: BaseRecipe, run: Run, outputs: Outputs, compared: Compared, notes: Sequence[str] = ()
) -> Outcome:
    """Promote and publish the policy of a run whose stages are done, write its report, and return its outcome."""
    failed = {label: error for label, error in _failed(run).items() if label != compared.failed}
    stages = [step.result() for step in run.steps if step.cause() is None]
    report = compared.report.result() if compared.report else None
    metrics: dict[str, Any] = {**report.metrics, "policies": policies_of(run.store, report)} if report else {}
    tables = {name: step.result() for name, step in outputs.comparisons.items() if failure([step]) is None}
    if tables:
        metrics["comparisons"] = {name: policies_of(run.store, table) for name, table in tables.items()}
    policies = metrics.get("policies", {})
    promotion = None
    if recipe.promotion and outputs.policy is not None:
        promotion = _promotion(recipe.promotion, run, outputs, compared, policies)
    named = {
        "policy": outputs.policy,
        "reward_model": outputs.reward_model,
        "rollouts": outputs.rollouts,
        "report": compared.report,
    }
    references = {name: reference_of(step) for name, step in named.items() if step is not None}
    if outputs.summary is not None:
        metrics |= outputs.summary.result().metrics
    if not metrics and stages:
        metrics = dict(stages[-1].metrics)
    leave_tables(stages, metrics)
    return Outcome(
        status="partly failed" if failed else "completed",
        run_id=run.journal.record.run_id,
        store=run.store.uri,
        stages=stages,
        cost=run_cost(stages),
        outputs={name: str(reference) for name, reference in references.items()},
        metrics=metrics,
        promotion=promotion,
        failed=failed,
        report=leave_report(recipe.name, run, stages, references, promotion, notes, failed),
    )


def _promotion(
    section: PromotionConfig, run: Run, outputs: Outputs, compared: Compared, policies: Mapping[str | None, Any]
) -> dict[str, Any]:
    """Promote the run's policy if its gates pass, and publish it if the recipe says so."""
    policy = reference_of(outputs.policy)
    final = {**measured_in_training(run.store, outputs), **policies.get(compared.final, {})}
    baseline = policies.get(compared.baseline, {})
    beside = compared.beside(section.tag)
    report = reference_of(compared.report) if compared.report else None
    run_id = run.journal.record.run_id
    promotion = promote(section, policy, final, baseline, beside, compared.expected, compared.problem, report, run_id)
    promotion["compared_with"] = compared.baseline if any(gate.compares for gate in section.gates) else None
    if section.publish and promotion["state"] in ("promoted", "unchanged"):
        promotion["publication"] = publish(section, policy)
    return promotion


def _failed(run: Run) -> dict[str, str]:
    """Errors of stages that failed without ending the run, by label. Stages that need them get a final state in Prefect."""
    failed = {step.label: str(error) for step in run.steps if (error := step.failure()) is not None}
    if failed:
        with only_shown("stages that never began"), get_client(sync_client=True) as client:
            close_not_begun(client, run.steps)
    return failed


def reference_of(value: Input) -> Reference:
    """The artifact behind an input."""
    return value if isinstance(value, Reference) else value.artifact()
