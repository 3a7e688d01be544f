"""``python -m alignment.flows.service.prefect_worker …``: Prefect's worker, with its temporary files in a folder of its own.

Prefect puts them into one folder of the system's temporary folder, where the worker of one user shuts out everybody else's.
Its runs have the system's temporary folder all the same: Ray's sockets need short paths.

An error that ends the worker, such as a server that has not answered for long, does not end its runs: Prefect would end them
first. The supervisor starts the worker again beside them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from typing import Any

TEMPORARY = "ALIGN_SERVICE_TEMPORARY"
"""Variable that names a service's folder, which goes when the service ends."""


def main() -> None:
    """The arguments are those of ``prefect worker start``."""
    tempfile.tempdir = os.environ.pop(TEMPORARY)
    from prefect.cli import app

    _keep_runs()
    _keep_places()
    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


def _keep_runs() -> None:
    """Exit at once on an error in the worker, before Prefect ends the processes of its runs. A signal ends them as before."""
    from prefect.workers.process import ProcessWorker

    leave = ProcessWorker.__aexit__

    async def leave_or_exit(self: ProcessWorker, *error: Any) -> None:
        if isinstance(error[1], Exception):
            traceback.print_exception(error[1])
            sys.stderr.flush()
            os._exit(1)
        await leave(self, *error)

    ProcessWorker.__aexit__ = leave_or_exit  # type: ignore[method-assign]


def _keep_places() -> None:
    """Take up no later run in the place of one that is about to resume."""
    from prefect.client.schemas.responses import WorkerFlowRunResponse
    from prefect.workers.process import ProcessWorker

    from alignment.flows.service.admission import admitted

    scheduled = ProcessWorker._get_scheduled_flow_runs

    async def admitted_alone(self: ProcessWorker) -> list[WorkerFlowRunResponse]:
        due = await scheduled(self)
        return await admitted(self.client, self.work_pool.concurrency_limit, due) if due else due

    ProcessWorker._get_scheduled_flow_runs = admitted_alone  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
