"""Prefect's settings: all files below ALIGN_HOME, no telemetry."""

from __future__ import annotations

import logging
import os

from alignment_core.home import align_home

WORKERS = ("APILogWorker", "EventsWorker")
"""Loggers of Prefect's background senders. They are outside Prefect's logging level, and print to the terminal at the end of a
run."""
UNUSED_SERVICES = ("SCHEDULER", "LATE_RUNS", "CANCELLATION_CLEANUP", "FOREMAN", "PAUSE_EXPIRATIONS", "TRIGGERS")


def prepare() -> None:
    """Set Prefect's environment variables, unless the user has set them. Call before ``import prefect``, which reads them."""
    quiet = "PREFECT_LOGGING_LEVEL" not in os.environ
    settings = {
        **at_home(),
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",  # for the API, see quiet_console
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
    """Settings for files below ALIGN_HOME and no telemetry."""
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
    """Keep the logs of flow and task runs off the terminal, where the live display shows their content."""
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False
    for name in WORKERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
