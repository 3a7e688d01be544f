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
CLOSE_SECONDS = 5.0
"""Time limit of the last inputs at the end of the run."""


class Artifacts:
    """Logs what the run made, and uses what it did not make. W&B has no ``use_artifact`` offline: then only what was made is
    recorded, with the references of its inputs as metadata.

    ``use_artifact`` waits for the server, so it is called in a thread of its own. ``complain`` gets the first failure.
    """

    def __init__(self, run: Any, folder: Path, complain: Callable[[str], None]) -> None:
        self._run = run
        self._path = folder / FILE
        self._complain = complain
        self._made: list[str] = []
        with suppress(OSError, ValueError):
            self._made = json.loads(self._path.read_text())
        self._used: set[str] = set()
        self._uses: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._use_all, name="inputs", daemon=True)
        self._thread.start()

    def record(self, made: list[dict[str, Any]], used: list[dict[str, Any]]) -> None:
        """Record the artifacts that a stage made and used."""
        for entry in used:
            if entry["name"] not in (*self._made, *self._used) and not self._run.offline:
                self._used.add(entry["name"])
                self._uses.put(entry)
        for entry in made:
            if entry["name"] not in self._made:
                self._made.append(entry["name"])
                self._try(self._run.log_artifact, entry)
                write_whole(self._path, lambda file: file.write(json.dumps(self._made).encode()))

    def close(self) -> None:
        """Wait a moment until all inputs are recorded."""
        self._uses.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _use_all(self) -> None:
        for entry in iter(self._uses.get, None):
            self._try(self._run.use_artifact, entry)

    def _try(self, record: Callable[[Any], Any], entry: dict[str, Any]) -> None:
        """Metrics are recorded even if artifacts cannot be."""
        try:
            record(_artifact(entry))
        except Exception as error:
            self._complain(f"artifacts of the run are incomplete: {type(error).__name__}: {error}")
            self._complain = lambda sentence: None


def _artifact(entry: dict[str, Any]) -> Any:
    """W&B's artifact, with one reference. Its address has a scheme of our own: W&B would look for a file or a bucket behind
    others. Its digest follows from the address alone, so it is the same artifact in every run."""
    import wandb

    artifact = wandb.Artifact(entry["name"], type=entry["type"], metadata=entry["metadata"])
    artifact.add_reference(entry["uri"], name="artifact", checksum=False)
    return artifact
