"""``python -m alignment.flows.service.prefect_server …``: uvicorn and Prefect's server, with a faster import.

On SQLite, transactions of Prefect's background tasks that read and then write fail if another one has written in between, and
are retried. Prefect filters these errors from its log, but on loggers that the tasks' library no longer uses; here the filter
is added to the current one.
"""

from __future__ import annotations

import logging

from alignment_core.imports import hidden, uncollected

with uncollected(), hidden("pandas"):
    import uvicorn
    from prefect.server.api import server  # the application that the arguments name

logging.getLogger("docket.dependencies").addFilter(server._SQLiteLockedOperationalErrorFilter())

if __name__ == "__main__":
    uvicorn.main()
