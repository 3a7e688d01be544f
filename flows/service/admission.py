"""The due runs that a worker may start: slots of crashed runs that are about to resume stay reserved."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowFilter
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.client.schemas.sorting import FlowRunSort

from alignment.flows.run_queue import ACTIVE, FLOW, SHOWN, in_pool
from alignment.flows.service.reconcile import may_resume, resumes_by_itself


async def admitted(
    client: PrefectClient, limit: int | None, due: Sequence[WorkerFlowRunResponse]
) -> list[WorkerFlowRunResponse]:
    """Due runs that may start now: resumed runs first, then new ones as far as crashed runs that are about to resume leave
    slots."""
    resumed = [response for response in due if response.flow_run.run_count]
    new = [response for response in due if not response.flow_run.run_count]
    if new and limit is not None:
        reserved = 0
        of_recipes = FlowFilter.model_validate({"name": {"any_": [FLOW]}})  # the reconciler resumes no others
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC  # the reconciler reads the same page of runs
        crashed = await client.read_flow_runs(
            **in_pool("CRASHED"), flow_filter=of_recipes, sort=newest_first, limit=SHOWN
        )
        for run in filter(may_resume, crashed):  # a pool may hold hundreds of old ones, whose states are not read
            reserved += resumes_by_itself(run, await client.read_flow_run_states(run.id))
        if reserved:
            active = len(await client.read_flow_runs(**in_pool(*ACTIVE), limit=SHOWN))
            new = new[: max(limit - active - len(resumed) - reserved, 0)]
    return [*resumed, *new]
