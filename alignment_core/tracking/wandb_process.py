"""The process that holds a W&B run: ``python -m alignment_core.tracking.wandb_process FD``; see ``wandb.py`` beside it."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any

from alignment_core.files import write_whole
from alignment_core.host.protocol import Channel
from alignment_core.tracking.wandb_artifacts import Artifacts

OPEN_SECONDS = 30.0
"""Timeout for its server, after which the run is recorded offline."""
FINISH_SECONDS = 10.0
"""Timeout of the last uploads."""
TRUE = ("1", "ON", "YES", "TRUE")
"""True values of WANDB_DISABLED in `transformers`; W&B itself no longer reads it."""
FLUSH_SECONDS = 2.0
"""Flush interval of the run's file: a kill loses at most this much."""


def main() -> None:
    """Entry point. The argument is the channel's file descriptor; the first message describes the run."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # a killed flow closes the channel, which closes the run
    channel = Channel(socket(fileno=int(sys.argv[1])))
    messages = channel.messages()
    opening = next(messages)

    def complain(sentence: str) -> None:
        channel.send({"complaint": " ".join(sentence.split())})

    try:
        mode = _mode(opening["mode"])
        if mode == "disabled":
            complain(
                "is disabled (WANDB_MODE, WANDB_DISABLED or `wandb disabled`), so that the run is not recorded there"
            )
            return _read(messages)
        if mode == "offline" != opening["mode"]:
            complain(f"is offline (WANDB_MODE or `wandb offline`); {_cure(opening)}")
        run = _open({**opening, "mode": mode}, complain)
        folder = Path(opening["folder"])
        _record(run, messages, Logged(folder), Artifacts(run, folder, complain))
    except TimeoutError:
        complain(f"the upload did not finish within {FINISH_SECONDS:g} s after the run; {_cure(opening)}")
    except Exception as error:
        traceback.print_exc()
        complain(f"{type(error).__name__}: {error}")


class Logged:
    """The last logged step of each stage and its metrics, in a file in the run's folder.

    A point cannot be removed from W&B, so steps that a resumed stage repeats after its checkpoint are logged once.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "logged.json"
        self._last: dict[str, tuple[float, list[str]]] = {}
        with suppress(OSError, ValueError):
            self._last = json.loads(self._path.read_text())

    def new(self, label: str, step: float, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics that are not logged yet; they count as logged from now on."""
        last, names = self._last.get(label, (-1.0, []))
        if step < last:
            return {}
        names = names if step == last else []
        added = {name: value for name, value in metrics.items() if name not in names}
        self._last[label] = (step, [*names, *added])
        if added:
            write_whole(self._path, lambda file: file.write(json.dumps(self._last).encode()))
        return added


def _mode(configured: str) -> str:
    """``disabled`` or ``offline`` if a variable or W&B's settings files set it for all runs; else the recipe's mode."""
    import wandb

    users = str(wandb.setup().settings.mode)
    if users == "disabled" or os.environ.get("WANDB_DISABLED", "").upper() in TRUE:
        return "disabled"
    return "offline" if users in ("offline", "dryrun") else configured


def _read(messages: Iterable[dict[str, Any]]) -> None:
    """Wait for the end of a run that is not recorded."""
    for message in messages:
        if "completed" in message:
            return


def _record(run: Any, messages: Iterable[dict[str, Any]], logged: Logged, artifacts: Artifacts) -> None:
    """Log all messages. Raises TimeoutError if the upload does not finish in time."""
    import wandb

    known: set[str] = set()
    completed = False
    for message in messages:
        if "metrics" in message:
            label, step = message["label"], message["step"]
            if metrics := logged.new(label, step, message["metrics"]):
                _log(run, known, label, step, metrics)
        elif "table" in message:
            run.log({message["table"]: wandb.Table(columns=message["columns"], data=message["rows"])})
        elif "made" in message:
            artifacts.record(message["made"], message["used"])
        elif "summary" in message:
            run.summary.update({f"{message['label']}/{name}": value for name, value in message["summary"].items()})
        else:
            completed = message["completed"]
            break
    artifacts.close()
    run.finish(exit_code=0 if completed else 1)


def _open(opening: dict[str, Any], complain: Callable[[str], None]) -> Any:
    """The run: online if possible, else offline."""
    import wandb

    if opening["mode"] == "offline":
        return _init(opening, "offline")
    try:
        return _init(opening, "online")
    except wandb.errors.UsageError as error:  # not logged in
        if opening["mode"] == "online":
            complain(f"{str(error).rstrip('.')}; {_cure(opening)}")
    except wandb.errors.Error as error:
        complain(f"its server cannot be used ({error}); {_cure(opening)}")
    wandb.teardown(exit_code=1)
    return _init(opening, "offline")


def _init(opening: dict[str, Any], mode: Any) -> Any:
    """Open the run without data on the machine, the program's arguments and its output: recipe and metrics suffice."""
    import wandb

    settings = wandb.Settings(
        console="off",
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        host="",
        init_timeout=OPEN_SECONDS,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=FLUSH_SECONDS,
    )
    return wandb.init(
        project=opening["project"],
        entity=opening["entity"],
        id=opening["id"],
        name=opening["name"],
        dir=opening["folder"],
        config=opening["recipe"],
        mode=mode,
        resume="allow",
        settings=settings,
    )


def _log(run: Any, known: set[str], label: str, step: float, metrics: dict[str, float]) -> None:
    """One point per metric, drawn over the stage's own steps, because W&B's counter of calls has no meaning."""
    axis = f"{label}/step"
    if axis not in known:
        known.add(axis)
        run.define_metric(axis, hidden=True)
    named = {f"{label}/{name}": value for name, value in metrics.items()}
    for name in named.keys() - known:
        known.add(name)
        run.define_metric(name, step_metric=axis)
    run.log({axis: step, **named})


def _cure(opening: dict[str, Any]) -> str:
    return f"the run is recorded offline, and `wandb sync` in {opening['folder']} uploads it"


if __name__ == "__main__":
    main()
