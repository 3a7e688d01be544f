"""``python -m flows.prefect_server …``: uvicorn, with Prefect's server imported in three quarters of the time."""

from __future__ import annotations

from alignment_core.imports import uncollected

with uncollected():
    import uvicorn
    from prefect.server.api import server  # noqa: F401 (the application that the arguments name)

if __name__ == "__main__":
    uvicorn.main()
