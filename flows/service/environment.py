"""Prefect's settings for a run without a server of its own: everything below ALIGN_HOME, nothing phones home."""

from __future__ import annotations

import logging
import os

from alignment_core.home import align_home

WORKERS = ("APILogWorker", "EventsWorker")
"""Prefect's background senders: their loggers are named after their classes, so that Prefect's own level does not reach them,
and at the end of a run they tell the terminal how many items they still have to send."""
UNUSED_SERVICES = ("SCHEDULER", "LATE_RUNS", "CANCELLATION_CLEANUP", "FOREMAN", "PAUSE_EXPIRATIONS", "TRIGGERS")


def prepare() -> None:
    """Set what Prefect reads when it is imported; the user's own settings win. Call before ``import prefect``."""
    quiet = "PREFECT_LOGGING_LEVEL" not in os.environ
    settings = {
        **at_home(),
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",  # these two go to the API; see quiet_console
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_TO_API_ENABLED": "true",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    if "PREFECT_API_URL" not in os.environ:
        settings |= {f"PREFECT_SERVER_SERVICES_{service}_ENABLED": "false" for service in UNUSED_SERVICES}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    (align_home() / "prefect").mkdir(parents=True, exist_ok=True)
    if quiet:
        quiet_console()


def at_home() -> dict[str, str]:
    """What keeps Prefect's files below ALIGN_HOME, and Prefect from telling anybody about them."""
    home = align_home() / "prefect"
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "storage"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "DO_NOT_TRACK": "1",
    }


def quiet_console() -> None:
    """Let the logs of flow and task runs reach Prefect's API only: what they tell, the live display shows."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False
    for name in WORKERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
