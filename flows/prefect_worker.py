"""``python -m flows.prefect_worker …``: Prefect's worker, with its temporary files below ALIGN_HOME.

Prefect puts them into one folder of the system's temporary folder, where the worker of one user shuts out everybody else's.
The variables of the process stay as they are: runs take theirs from it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile

from alignment_core.artifacts import align_home


def main() -> None:
    """The arguments are those of ``prefect worker start``."""
    folder = align_home() / "tmp" / "worker"
    shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed; a home has one at a time
    folder.mkdir(parents=True, mode=0o700)
    tempfile.tempdir = str(folder)
    from prefect.cli import app

    sys.argv = ["prefect", "worker", "start", *sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
