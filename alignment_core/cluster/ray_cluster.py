"""Starting a private Ray on loopback, or joining the cluster that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from alignment_core.errors import InfrastructureError

OBJECT_STORE_BYTES = 128 << 20
PRIVATE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux: true loopback
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}


def prepare_environment() -> None:
    """Set what Ray reads when it is imported. Call before the first ``import ray``."""
    for name, value in PRIVATE.items():
        os.environ.setdefault(name, value)


def connect(temporary: Path) -> Any:
    """Connect this process as a Ray driver, once; return the ``ray`` module.

    Without ``RAY_ADDRESS`` a private cluster is started that ends with this process and keeps its files in
    ``temporary``. Raises InfrastructureError if Ray does not come up.
    """
    prepare_environment()
    import ray

    if ray.is_initialized():
        return ray
    shared: dict[str, Any] = {"log_to_driver": True, "logging_level": "ERROR", "configure_logging": False}
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(address=os.environ["RAY_ADDRESS"], **shared)
        else:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(temporary),
                _node_ip_address="127.0.0.1",
                **shared,
            )
    except Exception as error:
        raise InfrastructureError(f"Ray did not start: {error}") from error
    return ray
