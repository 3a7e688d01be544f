"""Which due runs a worker takes up: it keeps the places of runs that crashed and are about to resume."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.client.schemas.sorting import FlowRunSort

from alignment.flows.run_queue import ACTIVE, SHOWN, in_pool
from alignment.flows.service.reconcile import FLOW, may_resume, resumes_by_itself


async def admitted(
    client: PrefectClient, limit: int | None, due: Sequence[WorkerFlowRunResponse]
) -> list[WorkerFlowRunResponse]:
    """Of runs that are due, those that a worker takes up now: runs that resume first, and no others in the places of runs that
    crashed and are about to resume."""
    resumed = [one for one in due if one.flow_run.run_count]
    others = [one for one in due if not one.flow_run.run_count]
    if others and limit is not None:
        reserved = 0
        ours = FlowFilter(name=FlowFilterName(any_=[FLOW]))  # those that a reconciler resumes
        newest_first = FlowRunSort.EXPECTED_START_TIME_DESC  # in what order the reconciler looks at them
        crashed = await client.read_flow_runs(**in_pool("CRASHED"), flow_filter=ours, sort=newest_first, limit=SHOWN)
        for run in filter(may_resume, crashed):  # a pool may hold hundreds of old ones: their states are not asked for
            reserved += resumes_by_itself(run, await client.read_flow_run_states(run.id))
        if reserved:
            active = len(await client.read_flow_runs(**in_pool(*ACTIVE), limit=SHOWN))
            others = others[: max(limit - active - len(resumed) - reserved, 0)]
    return [*resumed, *others]
