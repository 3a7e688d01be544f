"""``python -m alignment.flows.service.prefect_worker …``: Prefect's worker with three changes.

Prefect uses one fixed folder below the system's temporary folder, which the worker of one user blocks for all others. Runs
keep the system's temporary folder, because Ray's sockets need short paths.

On an error in the worker, such as a long outage of the server, Prefect ends the worker's runs. Here they keep running, and the
supervisor starts the worker again beside them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from typing import Any

TEMPORARY = "ALIGN_SERVICE_TEMPORARY"
"""Variable with a service's temporary folder, which is deleted when the service ends."""


def main() -> None:
    """Start the worker with the arguments of ``prefect worker start``."""
    tempfile.tempdir = os.environ.pop(TEMPORARY)
    from prefect.cli import app

    _keep_runs_on_errors()
    _reserve_slots()
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


def _keep_runs_on_errors() -> None:
    """Exit on an error in the worker before Prefect ends the processes of its runs. A signal still ends them."""
    from prefect.workers.process import ProcessWorker

    original_aexit = ProcessWorker.__aexit__

    async def aexit(self: ProcessWorker, *error: Any) -> None:
        if isinstance(error[1], Exception):
            traceback.print_exception(error[1])
            sys.stderr.flush()
            os._exit(1)
        await original_aexit(self, *error)

    ProcessWorker.__aexit__ = aexit  # type: ignore[method-assign]


def _reserve_slots() -> None:
    """Start no new run in the slot of a crashed run that is about to resume."""
    from prefect.client.schemas.responses import WorkerFlowRunResponse
    from prefect.workers.process import ProcessWorker

    from alignment.flows.service.admission import admitted

    original = ProcessWorker._get_scheduled_flow_runs

    async def scheduled(self: ProcessWorker) -> list[WorkerFlowRunResponse]:
        due = await original(self)
        return await admitted(self.client, self.work_pool.concurrency_limit, due) if due else due

    ProcessWorker._get_scheduled_flow_runs = scheduled  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
