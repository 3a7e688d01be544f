"""The artifacts of a W&B run: references to artifacts of the store, as outputs and inputs of the run. No bytes are uploaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from alignment_core.files import write_whole

FILE = "artifacts.json"
"""Names of the artifacts that the run logged, in its folder: a resumed run has them as its own."""
CLOSE_SECONDS = 3.0
"""Time limit of the last artifacts at the end of the run."""


class Artifacts:
    """Logs the artifacts that the run made; others are its inputs. W&B has no ``use_artifact`` offline: then only outputs are
    recorded, with the references of their inputs as metadata.

    Both wait for the server, so they are called in a thread of their own. ``complain`` gets the first failure.
    """

    def __init__(self, run: Any, folder: Path, complain: Callable[[str], None]) -> None:
        self._run = run
        self._path = folder / FILE
        self._complain = complain
        self._logged: list[str] = []
        with suppress(OSError, ValueError):
            self._logged = json.loads(self._path.read_text())
        self._used: set[str] = set()
        self._queue: SimpleQueue[tuple[bool, dict[str, Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="artifacts", daemon=True)
        self._thread.start()

    def record(self, outputs: list[dict[str, Any]], inputs: list[dict[str, Any]]) -> None:
        """Record the artifacts that a stage made and used."""
        for entry in inputs:
            self._queue.put((False, entry))
        for entry in outputs:
            self._queue.put((True, entry))

    def close(self) -> None:
        """Wait a moment until all artifacts are recorded."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._complain(
                f"artifacts of the run are incomplete: W&B's server took more than {CLOSE_SECONDS:g} s at its end"
            )

    def _work(self) -> None:
        """Metrics are recorded even if artifacts cannot be."""
        for is_output, entry in iter(self._queue.get, None):
            try:
                self._log(entry) if is_output else self._use(entry)
            except Exception as error:
                self._complain(f"artifacts of the run are incomplete: {type(error).__name__}: {error}")
                self._complain = lambda sentence: None

    def _log(self, entry: dict[str, Any]) -> None:
        if entry["name"] not in self._logged:
            self._run.log_artifact(_artifact(entry))
            self._logged.append(entry["name"])
            write_whole(self._path, lambda file: file.write(json.dumps(self._logged).encode()))

    def _use(self, entry: dict[str, Any]) -> None:
        if entry["name"] not in (*self._logged, *self._used) and not self._run.offline:
            self._run.use_artifact(_artifact(entry))
            self._used.add(entry["name"])


def _artifact(entry: dict[str, Any]) -> Any:
    """W&B's artifact, with one reference. Its address has a scheme of our own: W&B would look for a file or a bucket behind
    others. Its digest follows from the address alone, so it is the same artifact in every run."""
    import wandb

    artifact = wandb.Artifact(entry["name"], type=entry["type"], metadata=entry["metadata"])
    artifact.add_reference(entry["uri"], name="artifact", checksum=False)
    return artifact
