"""``python -m alignment.flows.service.prefect_worker …``: Prefect's worker, with its temporary files in a folder of its own.

Prefect puts them into one folder of the system's temporary folder, where the worker of one user shuts out everybody else's.
Its runs have the system's temporary folder all the same: Ray's sockets need short paths.
"""

from __future__ import annotations

import os
import sys
import tempfile

TEMPORARY = "ALIGN_SERVICE_TEMPORARY"
"""Variable that names a service's folder, which goes when the service ends."""


def main() -> None:
    """The arguments are those of ``prefect worker start``."""
    tempfile.tempdir = os.environ.pop(TEMPORARY)
    from prefect.cli import app

    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
