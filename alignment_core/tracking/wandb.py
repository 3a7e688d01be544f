"""Weights & Biases: a listener that forwards events to a separate process.

In the flow's process W&B would hook ``sys.exit``, put a token into the environment, and delay the interpreter's exit (by 90
seconds if its server does not respond). The supervisor ends its process together with the flow, also after a kill.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socketpair
from typing import Any

from alignment_core.artifacts import Reference
from alignment_core.credentials import cut
from alignment_core.errors import AlignmentError
from alignment_core.execution.base import StageCall, StageResult
from alignment_core.execution.curve import Line
from alignment_core.host.protocol import Channel
from alignment_core.host.subprocess_tree import Supervised, short_folder
from alignment_core.printable import printable
from alignment_core.processes import inherited
from alignment_core.recipes import BaseRecipe
from alignment_core.recipes.sections.tracking import WandbConfig
from alignment_core.tracking.listener import Listener, Progress, numbers

GRACE_SECONDS = 5.0
"""Time for W&B to write its last events after the flow was killed."""


class WandbRun(Listener):
    """The W&B run with the name of ``folder`` as its id, which is resumed if it exists. Its files are in ``folder``."""

    def __init__(
        self, settings: WandbConfig, recipe: BaseRecipe, folder: Path, warn: Callable[[str], None], store: str = ""
    ) -> None:
        self.log = folder / "wandb.log"
        self._store = store
        self._calls: dict[str, StageCall] = {}
        self._warn = warn
        own_socket, child_socket = socketpair(AF_UNIX, SOCK_STREAM)
        temporary = short_folder()
        with child_socket:
            self.process = Supervised(
                [sys.executable, "-m", "alignment_core.tracking.wandb_process", str(child_socket.fileno())],
                _environment(temporary),
                self.log,
                temporary,
                inherited=[child_socket.fileno()],
                grace=GRACE_SECONDS,
            )
        self.channel = Channel(own_socket)
        self._complaints = threading.Thread(target=self._pass_on, daemon=True)
        self._complaints.start()
        self._send(
            settings.model_dump(mode="json")
            | {
                "id": folder.name,
                "name": recipe.name,
                "folder": str(folder),
                "recipe": cut(recipe.model_dump(mode="json")),
            }
        )

    def progress(self, label: str, progress: Progress) -> None:
        if progress.metrics:
            self._send({"label": label, "step": progress.done, "metrics": dict(numbers(progress.metrics))})

    def resumed(self, label: str, lines: Sequence[Line]) -> None:
        for line in lines:
            self._send({"label": label, "step": line["step"], "metrics": dict(numbers(line["metrics"]))})

    def requested(self, call: StageCall, key: str) -> None:
        self._calls[call.label] = call

    def produced(self, result: StageResult) -> None:
        """Artifacts of the run: it made the outputs of stages that ran, from their inputs, and used those of cached ones."""
        call = self._calls.pop(result.label, None)
        if call is None:
            return
        inputs = {role: str(reference) for role, reference in call.inputs.items()}
        details = {"stage": result.stage, "label": result.label, "key": result.key, "inputs": inputs}
        outputs = [self._artifact(reference, **details) for reference in dict.fromkeys(result.outputs.values())]
        used = [self._artifact(reference) for reference in dict.fromkeys(call.inputs.values())]
        ran = result.state == "run"
        self._send({"made": outputs if ran else [], "used": used if ran else outputs})

    def _artifact(self, reference: Reference, **details: Any) -> dict[str, Any]:
        """An artifact as W&B has it: its name and its version follow from its content, which stays in the store."""
        return {
            "name": f"{reference.kind}-{reference.digest[:12]}",
            "type": reference.kind,
            "uri": f"align:{reference}",
            "metadata": cut({"reference": str(reference), "store": self._store, **details}),
        }

    def finished(self, result: StageResult) -> None:
        summary = {**dict(numbers(result.metrics)), "reference": str(result.reference), "state": result.state}
        self._send({"label": result.label, "summary": summary})

    def texts(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        cells = [[printable(str(row.get(name, ""))) for name in names] for row in rows]
        self._send({"table": title, "columns": names, "rows": cells})

    def ended(self, completed: bool) -> None:
        """Wait until W&B has received everything, or has reported a failure."""
        self._send({"completed": completed})
        self._complaints.join()  # ends when the process closes its channel
        self.process.close()

    def _pass_on(self) -> None:
        for message in self.channel.messages():
            self._warn(f"W&B: {message['complaint']}")

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.channel.send(message)
        except OSError:
            self.process.close()
            raise AlignmentError(f"its process has ended; see {self.log}") from None


def _environment(temporary: Path) -> dict[str, str]:
    """The user's environment, which may contain the key; caches of W&B are in a folder that is deleted at the end."""
    places = {f"WANDB_{name}_DIR": str(temporary / name.lower()) for name in ("CACHE", "DATA")}
    return inherited(**places, TMPDIR=str(temporary), WANDB_ERROR_REPORTING="false")
