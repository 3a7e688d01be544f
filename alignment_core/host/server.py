"""The run host's process: the Ray driver of a run. Executes stage calls, several at a time."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import SHUT_RD, socket
from typing import Any

from alignment_core import journal
from alignment_core.artifacts import open_store
from alignment_core.cluster import ray_cluster
from alignment_core.errors import AlignmentError, InfrastructureError, Stopped
from alignment_core.execution.base import StageCall
from alignment_core.execution.curve import finite
from alignment_core.execution.key import StageKey
from alignment_core.execution.machines import WarmMachines
from alignment_core.execution.runner import StageRequest, run_stage
from alignment_core.execution.scheduling import RunName, Ticket
from alignment_core.heartbeat import listening
from alignment_core.home import align_home
from alignment_core.host.progress_log import Pace, Progress
from alignment_core.host.protocol import RAY_DIED, Channel, describe
from alignment_core.imports import uncollected
from alignment_core.recipes import ResourcesConfig
from alignment_core.stop_time import extended, note, supervisors

PROGRESS_SECONDS = 0.2
OUTPUT_SECONDS = 1.0
"""Ray delivers the last output of a dead actor within this time; after the answer the flow may stop reading."""


class Server:
    """Answers each call with progress messages and one result or failure."""

    def __init__(
        self, channel: Channel, store: str, resources: ResourcesConfig, temporary: Path, prewarm: Sequence[str]
    ) -> None:
        self.channel = channel
        self.temporary = temporary
        self.prewarm = prewarm
        self.store = open_store(store)
        self.resources = resources
        shared = self.store.workspace if self.store.holds_workspace else None
        self.machines = WarmMachines(resources, temporary, align_home() / "locks", shared)
        self.stopping = threading.Event()
        self._working = 0
        """Number of stages that run and do not wait."""
        self._idle = threading.Condition()
        self._save_seconds: dict[str, float] = {}
        """The longest time that each part of saving progress took, of all stages."""

    def serve(self) -> None:
        """Execute calls until the flow closes the channel."""
        try:
            self.machines.actors.connect()
        except AlignmentError:
            traceback.print_exc()  # every stage tries again, and reports the failure to the flow
        else:
            if ray_cluster.is_private():
                threading.Thread(target=self._end_without_ray, daemon=True).start()
            threading.Thread(target=self._warm_up, daemon=True).start()
        _import_for_all_threads()
        signal.signal(signal.SIGTERM, self.stop_reading)  # Ray replaced the handler of this process
        for message in self.channel.messages():
            threading.Thread(target=self._execute, args=(message,), daemon=True).start()

    def stop_reading(self, *_: object) -> None:
        """On SIGTERM, end the stream of messages so that ``serve`` returns.

        An exception from the handler could interrupt the shutdown itself, because the signal and the end of the channel arrive
        together when a flow is killed.
        """
        with contextlib.suppress(OSError):
            self.channel.end.shutdown(SHUT_RD)

    def wind_down(self) -> None:
        """Wait until running stages have saved their progress, at most the recipe's ``stop_seconds`` or three times what saving
        took, then end all actors."""
        self.stopping.set()
        with self._idle:
            self._idle.wait_for(lambda: self._working == 0, extended(self.resources.stop_seconds, self.temporary))
        self.machines.close()

    def _note_save(self, run_id: str, part: str, seconds: float) -> None:
        """Let the processes that stop this one know how long saving takes."""
        with self._idle:
            self._save_seconds[part] = max(seconds, self._save_seconds.get(part, 0.0))
            needed = sum(self._save_seconds.values())
        for folder in [*supervisors(), *([journal.folder_of(run_id)] if run_id else [])]:
            note(folder, needed)

    def _count_working(self, change: int) -> None:
        with self._idle:
            self._working += change
            self._idle.notify_all()

    def _end_without_ray(self) -> None:
        """End this process when Ray's daemons die: the supervisor ends the rest, and the flow starts another host."""
        name = ray_cluster.daemon_that_dies()
        if not self.stopping.is_set():
            print(
                f"Ray's {name} died, so this run host ends; stages continue in a new one", file=sys.stderr, flush=True
            )
            os._exit(RAY_DIED)

    def _warm_up(self) -> None:
        try:
            self.machines.warm_up(self.prewarm)
        except Exception:
            traceback.print_exc()  # a stage that needs the actors tries again, and reports the failure

    def _execute(self, message: dict[str, Any]) -> None:
        number = message["id"]
        self._count_working(1)
        try:
            call = StageCall.model_validate(message["call"])
            ticket = Ticket(
                order=message["order"],
                waits=self._waiter(number),
                starts=lambda component: self._send({"id": number, "event": "starts", "what": component}),
                label=call.label,
                run=RunName(message["run_ids"].get("prefect", ""), message["recipe"]),
            )
            request = StageRequest(
                self.store,
                call,
                self.machines,
                self.resources,
                self._reporter(number, call),
                resumed=lambda lines: self._send({"id": number, "event": "resumed", "lines": lines}),
                saved=partial(self._note_save, message["run_ids"].get("prefect", "")),
                run_ids=message["run_ids"],
                recipe=message["recipe_files"],
                overrides=tuple(message["overrides"]),
                ticket=ticket,
                stopping=self.stopping,
                key=StageKey.model_validate(message["key"]) if message["key"] else None,
                requested=message["requested"],
                warn=lambda sentence: self._send({"id": number, "event": "warning", "sentence": sentence}),
            )
            ticket.starts(None)  # the host is ready
            with listening(self._heart(number)):
                result = run_stage(request)
            answer = {"id": number, "event": "done", "result": result.model_dump(mode="json")}
        except BaseException as error:  # of any type: the flow waits for an answer
            logging.exception("%s failed", message["call"].get("label"))
            if isinstance(error, InfrastructureError):
                time.sleep(OUTPUT_SECONDS)
            answer = {"id": number, "event": "failed", "error": describe(error)}
        self._send(answer)
        self._count_working(-1)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.channel.send(message)
        except OSError:
            if not self.stopping.is_set():
                logging.warning("the flow process is gone; the answer is discarded")

    def _waiter(self, number: int) -> Callable[[str | None], None]:
        """The callback for the beginning, change of reason, and end (None) of a stage's wait."""
        waiting = False

        def waits(reason: str | None) -> None:
            nonlocal waiting
            if waiting != bool(reason):
                waiting = bool(reason)
                self._count_working(-1 if waiting else 1)
            if not waiting and self.stopping.is_set():
                raise Stopped("stopped while waiting")
            self._send({"id": number, "event": "waits", "for": reason})

        return waits

    def _heart(self, number: int) -> Callable[[], None]:
        """The callback for heartbeats of a stage, which tells the flow of them now and then."""
        last = 0.0

        def beat() -> None:
            nonlocal last
            if time.monotonic() - last >= PROGRESS_SECONDS:
                last = time.monotonic()
                self._send({"id": number, "event": "heartbeat"})

        return beat

    def _reporter(self, number: int, call: StageCall) -> Any:
        """The callback for a stage's progress, which sends all metrics and logs a line when due."""
        last = 0.0
        pace = Pace()
        shows = call.definition().shows

        def report(done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None:
            nonlocal last
            pace.seen(Progress(done, total, unit, metrics, shows))
            if pace.due():
                logging.info("%s: %s", call.label, pace.line())
            if not metrics and time.monotonic() - last < PROGRESS_SECONDS and done != total:
                return
            last = time.monotonic()
            counts = {"done": done, "total": total, "unit": unit, "metrics": finite(metrics)}
            self._send({"id": number, "event": "progress", **counts})

        return report


def _import_for_all_threads() -> None:
    """Import transformers before threads do: it loads names lazily, and concurrent first imports see it incomplete."""
    with uncollected():
        import pyarrow.parquet  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401


def main() -> None:
    """Entry point. Arguments: the channel's file descriptor, the store, the resources (JSON), a temporary folder, and the
    groups of actors to start at once."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    end, store, resources, temporary, *prewarm = sys.argv[1:]
    channel = Channel(socket(fileno=int(end)))
    server = Server(channel, store, ResourcesConfig.model_validate_json(resources), Path(temporary), prewarm)
    signal.signal(signal.SIGTERM, server.stop_reading)
    code = 1
    try:
        server.serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.wind_down()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of abandoned stages must not keep the process alive


if __name__ == "__main__":
    main()
