"""What surrounds a composition: opening the run, waiting for its stages, promoting, and the outcome that is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext
from prefect.futures import as_completed
from pydantic import BaseModel

from alignment_core.artifacts import Reference, align_home, open_store
from alignment_core.errors import AlignmentError, Stopped
from alignment_core.host.client import Host
from alignment_core.lineage import Graph, mermaid
from alignment_core.recipes import BaseRecipe
from alignment_core.stages.base import StageResult
from alignment_core.stages.report import cell
from flows.early import COMMAND_LINE
from tasks.evaluation import promote
from tasks.stage import CURRENT, Input, Run, Step


class Outcome(BaseModel):
    """What a run came to: the JSON object that ``align run --json`` prints last."""

    status: str
    run_id: str
    store: str
    stages: list[StageResult] = []
    outputs: dict[str, str] = {}
    metrics: dict[str, Any] = {}
    promotion: dict[str, Any] | None = None
    error: str | None = None


class Outputs(BaseModel):
    """What a composition hands back: the steps that made the run's results."""

    model_config = {"arbitrary_types_allowed": True}

    policy: Any = None
    reward_model: Any = None
    report: Any = None
    final: str | None = None
    """Label of the policy that may be promoted, as the report calls it."""
    baseline: str | None = None


def run_recipe(recipe: BaseRecipe, compose: Callable[[Any], Outputs]) -> dict[str, Any]:
    """Run a composition with its own host; returns an :class:`Outcome` as plain data. Raises the first failure."""
    with _open_run(recipe) as run:
        try:
            outputs = compose(recipe)
            _wait(run)
        except BaseException as error:
            run.host.close()  # first: it wakes the stages that wait for an answer
            raise _cause(run, error) from None
        return _outcome(recipe, run, outputs).model_dump(mode="json")


@contextmanager
def _open_run(recipe: BaseRecipe) -> Iterator[Run]:
    context = FlowRunContext.get()
    run_id = str(context.flow_run.id) if context and context.flow_run else str(uuid4())
    store = open_store(recipe.store)
    caller = COMMAND_LINE.get()
    log = align_home() / "logs" / f"{run_id}.log"
    with (caller and caller.host) or Host(store.uri, recipe.resources, log) as host:
        host.run_ids = {"prefect": run_id}
        run = Run(
            store=store,
            host=host,
            results=store.workspace.root / "results",
            resources=recipe.resources,
            seed=recipe.seed,
            listener=caller.listener if caller else None,
        )
        token = CURRENT.set(run)
        try:
            yield run
        finally:
            CURRENT.reset(token)


def _wait(run: Run) -> None:
    """Wait for all stages, announcing each as it ends. Raises the first failure as soon as it happens."""
    steps = {step.future.task_run_id: step for step in run.steps}
    for future in as_completed([step.future for step in run.steps]):
        steps[future.task_run_id].result()


def _cause(run: Run, error: BaseException) -> BaseException:
    """The failure that started it all: a stage whose input failed reports only that it could not begin."""
    if not isinstance(error, Exception):
        return error  # Ctrl-C, cancellation
    if isinstance(error, AlignmentError) and not isinstance(error, Stopped):
        return error
    failures = [failure for step in run.steps if (failure := step.failure()) is not None]
    return next((failure for failure in failures if not isinstance(failure, Stopped)), error)


def _outcome(recipe: BaseRecipe, run: Run, outputs: Outputs) -> Outcome:
    stages = [step.result() for step in run.steps]
    report = outputs.report.result() if outputs.report else None
    metrics: dict[str, Any] = dict(report.metrics) if report else {}
    policies = metrics.get("policies", {})
    promotion = None
    if recipe.promotion and outputs.policy is not None:
        final, baseline = policies.get(outputs.final, {}), policies.get(outputs.baseline, {})
        promotion = promote(recipe.promotion, reference_of(outputs.policy), final, baseline)
    named = {"policy": outputs.policy, "reward_model": outputs.reward_model, "report": outputs.report}
    references = {name: reference_of(step) for name, step in named.items() if step is not None}
    if report is None:
        metrics = dict(stages[-1].metrics)
    _leave_artifacts(run, stages, metrics, list(references.values()))
    context = FlowRunContext.get()
    return Outcome(
        status="completed",
        run_id=str(context.flow_run.id) if context and context.flow_run else "",
        store=run.store.uri,
        stages=stages,
        outputs={name: str(reference) for name, reference in references.items()},
        metrics=metrics,
        promotion=promotion,
    )


def reference_of(value: Input) -> Reference:
    """The artifact behind an input."""
    return value.result().reference if isinstance(value, Step) else value


def _leave_artifacts(run: Run, stages: list[StageResult], metrics: dict[str, Any], outputs: list[Reference]) -> None:
    """The run's tables and its lineage graph, shown by the Prefect UI on the run's page.

    They have no key: for artifacts with one the server emits an event while its SQLite transaction is open, and has
    been seen to block itself for a minute that way.
    """
    table = [
        {
            "stage": s.label,
            "state": s.state,
            "seconds": round(s.seconds, 1),
            "reference": s.reference.short,
            "why": s.reason,
        }
        for s in stages
    ]
    create_table_artifact(table=table, description="Stages of this run")
    policies = metrics.get("policies", {})
    if policies:
        rows = [
            {"policy": name, **{column: cell(values, column) for column in ("accuracy", "reward", "win_rate", "kl")}}
            for name, values in policies.items()
        ]
        create_table_artifact(table=rows, description="Policies on the held-out prompts")
    graph = mermaid(Graph.of(run.store), outputs)
    create_markdown_artifact(markdown=f"```mermaid\n{graph}\n```\n", description="Where the outputs come from")


def project_file(*parts: str) -> Path:
    """A file of this project, such as a shipped recipe."""
    return Path(__file__).resolve().parent.parent.joinpath(*parts)
