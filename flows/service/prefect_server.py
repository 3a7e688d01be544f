"""``python -m alignment.flows.service.prefect_server …``: uvicorn; Prefect's server is imported in three quarters of the time.

On SQLite some transactions of Prefect's background tasks read first and write then; SQLite refuses that where another one
has written between, and the task tries again. Prefect leaves such records out of its log, but of loggers that its tasks'
library no longer uses: here they are left out of the one that it does.
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
