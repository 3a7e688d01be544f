"""The journal of a run: its recipe, the states of its stages, and whether its process is alive.

One folder a run below ``ALIGN_HOME/runs``. It is a view for people and for ``align resume``; results depend on the store alone.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from alignment_core.credentials import cut
from alignment_core.errors import EnvironmentFault, NotFound, Stopped, UserError
from alignment_core.home import align_home
from alignment_core.processes import ProcessId, is_locked, lock, wait_until
from alignment_core.stop_time import extended

M = TypeVar("M", bound=BaseModel)
RUN, STAGES, PROGRESS, WAITS, LOCK = "run.json", "stages.jsonl", "progress.json", "waits.json", "lock"
PROGRESS_SECONDS = 0.5
LAST = "last"
"""Name of the run that started last."""
STOPPING_SECONDS = 60.0
"""Longest wait of a new attempt of a run for the process of the previous one, unless saving takes long."""
END_SECONDS = 15.0
"""Time between SIGTERM and SIGKILL, in addition to the grace of the run's stages to save their work."""


class StageLine(BaseModel):
    """Outcome of a stage in this run."""

    model_config = ConfigDict(frozen=True)

    label: str
    stage: str
    key: str
    key_parts: dict[str, Any]
    state: str
    """``running``, ``run``, ``cached``, ``failed``, or ``stopped`` if the run ended before it."""
    at: str
    """Time of the last change, ISO 8601 in UTC."""
    reason: str = ""
    """Why it ran, or how it failed."""
    seconds: float = 0.0
    """Seconds of work, without start-up and waits."""
    startup_seconds: float = 0.0
    waited_seconds: float = 0.0
    restarts: tuple[str, ...] = ()
    """The reason of each restart, a sentence each, in all attempts of the run."""
    outputs: dict[str, str] = {}
    """References of its outputs by name, the default output first; empty until it is done."""
    made_by: str = ""
    """The key of its record, once it is done; with `reuse_across_versions` it may differ from ``key``."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reference(self) -> str | None:
        """The default output, once it is made."""
        return next(iter(self.outputs.values()), None)


class RunRecord(ProcessId):
    """A run's recipe, and the process that runs it."""

    run_id: str
    name: str
    recipe: dict[str, Any]
    store: str
    from_stage: str | None = None
    rerun: str = ""
    """Part of the keys of stages that are run again on purpose; empty for an ordinary run."""
    overrides: tuple[str, ...] = ()
    """The arguments of ``align run --set``, which the recipe already contains: they are part of the run's name."""
    flow: str = ""
    """File and name of the user's own flow, as ``/path/file.py:function``; empty for a recipe."""
    parameters: dict[str, Any] = {}
    """The parameters of that flow."""
    deployed: bool = False
    """Whether a worker ran it; otherwise ``align run`` did."""
    server: str = ""
    """Address of the Prefect API that it used; empty if none was set."""
    machine: str
    """Host name, for people only: a container has a new one each time."""
    started_at: str
    attempt: int = 1
    run_count: int = 0
    """Number of starts by Prefect when this process opened the run: a later start belongs to another process."""
    resolved: dict[str, str] = {}
    """The artifacts of tags and the commits of Hub names, as the run first resolved them. Empty in records of earlier
    versions."""
    status: str = "running"
    """``running``, ``completed``, ``failed``, ``cancelled`` or ``stopped``; a run whose process died stays ``running`` here."""
    error: str | None = None


class StageProgress(BaseModel):
    """Progress of a running stage."""

    model_config = ConfigDict(frozen=True)

    since: float
    """Unix time at which the stage started or restarted in this attempt of the run."""
    done: float
    total: float | None
    unit: str

    @property
    def text(self) -> str:
        """Such as ``3 of 10 steps``."""
        return f"{self.done:g}{f' of {self.total:g}' if self.total else ''} {self.unit}"


class StageWait(BaseModel):
    """The wait of a stage."""

    model_config = ConfigDict(frozen=True)

    reason: str
    since: float
    """Unix time at which the wait began, even if its reason has changed since."""


class Journal:
    """Writes the journal of the run that this process runs. Use from several threads."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.folder = folder_of(record.run_id)
        self._writing = threading.Lock()
        self._lines: dict[str, dict[str, Any]] = {}
        self._torn = False
        self._progress: dict[str, StageProgress] = {}
        self._progress_written = 0.0
        self._waits: dict[str, StageWait] = {}
        self._restarts: dict[str, tuple[str, ...]] = {}

    def stage(self, label: str, state: str, **news: Any) -> None:
        """Append changes of a stage: fields of :class:`StageLine`. Each line repeats all known fields, because earlier lines
        may be lost on a full disk."""
        with self._writing:
            known = self._lines.setdefault(label, {})
            known |= {"label": label, "state": state, "at": now(), **news}
            if known.get("reason"):
                known["reason"] = cut(known["reason"])
            line = ("\n" if self._torn else "") + json.dumps(known) + "\n"
            self._torn = True
            with suppress(OSError):  # a full disk must not end the run
                with (self.folder / STAGES).open("a") as file:
                    file.write(line)
                self._torn = False

    def restart(self, label: str, sentence: str) -> None:
        """Note the restart of a stage, with the reason."""
        with self._writing:
            state = str(self._lines.get(label, {}).get("state", "running"))
            restarts = self._restarts[label] = (*self._restarts.get(label, ()), sentence)
        self.stage(label, state, restarts=restarts)

    def resolved(self, names: dict[str, str]) -> None:
        """Record what names stand for in this run, for its later attempts."""
        with self._writing:
            self.record = self.record.model_copy(update={"resolved": names})
            with suppress(OSError):  # a full disk must not end the run, whose end writes them again
                self._write()

    def progress(self, label: str, done: float, total: float | None, unit: str) -> None:
        """Report the progress of a stage; written at most every half second."""
        with self._writing:
            before, moment = self._progress.get(label), time.time()
            since = before.since if before and before.done < done else moment
            self._progress[label] = StageProgress(since=since, done=done, total=total, unit=unit)
            if moment - self._progress_written > PROGRESS_SECONDS:
                self._progress_written = moment
                self._write_by_label(PROGRESS, self._progress)

    def waits(self, label: str, reason: str | None) -> None:
        """Report the reason of a stage's wait; None: its wait is over."""
        with self._writing:
            before = self._waits.pop(label, None)
            if reason is not None:
                self._waits[label] = StageWait(reason=reason, since=before.since if before else time.time())
            self._write_by_label(WAITS, self._waits)

    def _write_by_label(self, file: str, content: Mapping[str, BaseModel]) -> None:
        with suppress(OSError):  # a full disk must not end the run
            _replace(self.folder / file, json.dumps({label: entry.model_dump() for label, entry in content.items()}))

    def end(self, status: str | None = None, error: BaseException | None = None) -> None:
        """Record how the run ended; without a ``status``, the ``error`` decides between failed and stopped."""
        failed = isinstance(error, Exception) and not isinstance(error, Stopped)
        status = status or ("failed" if failed else "stopped")
        text = None if error is None else cut(str(error)) or type(error).__name__
        self.record = self.record.model_copy(update={"status": status, "error": text})
        self._write()

    def _write(self) -> None:
        _replace(self.folder / RUN, self.record.model_dump_json(indent=2))

    @contextmanager
    def open(self) -> Iterator[Journal]:
        """Hold the run's lock, which the end of this process frees.

        A process that is stopping keeps it for a while. Raises UserError if it is not free after that.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("ab") as lock_file:
            if not wait_until(lambda: lock(lock_file), extended(STOPPING_SECONDS, self.folder)):
                raise UserError(f"run {self.record.run_id} is running in another process already")
            with suppress(NotFound):
                earlier = read(self.record.run_id)
                changes = {"attempt": earlier.attempt + 1, "resolved": {**self.record.resolved, **earlier.resolved}}
                self.record = self.record.model_copy(update=changes)
            self._restarts = {label: line.restarts for label, line in stages(self.record.run_id).items()}
            for name in (PROGRESS, WAITS):  # of the previous attempt
                (self.folder / name).unlink(missing_ok=True)
            with (self.folder / STAGES).open("a") as file:
                file.write("\n")  # ends a line that a kill may have cut
            self._write()
            try:
                yield self
            except BaseException as error:
                self.end(error=error)
                raise
            if self.record.status == "running":
                self.end("completed")


def _replace(path: Path, content: str) -> None:
    """Write a file, whole or not at all. Without fsync, unlike ``write_whole``: progress is written twice a second, and no
    result depends on the journal."""
    partial = path.with_suffix(".partial")
    partial.write_text(content)
    os.replace(partial, path)


def new_record(run_id: str, name: str, recipe: dict[str, Any], store: str, **more: Any) -> RunRecord:
    """The record of a run that starts now in this process."""
    return RunRecord(
        run_id=run_id,
        name=name,
        recipe=recipe,
        store=store,
        machine=socket.gethostname(),
        **ProcessId.mine().model_dump(),
        started_at=now(),
        **more,
    )


def now() -> str:
    """This moment, ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def short_id(run_id: str) -> str:
    """The first digits of a run's id, which distinguish it from others: usually 8.

    Ids of scheduled runs begin with the time (UUID version 7, RFC 9562), so that those made within a minute share 8 digits,
    and those made in one insertion 12; the first four groups include 26 random bits.
    """
    return run_id[:23] if run_id[14:15] == "7" else run_id[:8]


def folder_of(run_id: str) -> Path:
    """The folder of a run's journal."""
    return align_home() / "runs" / run_id


def read(run_id: str) -> RunRecord:
    """The record of a run. Raises NotFound."""
    try:
        return RunRecord.model_validate_json((folder_of(run_id) / RUN).read_text())
    except (OSError, ValidationError):
        raise NotFound(f"no run {run_id!r} in {align_home() / 'runs'}") from None


def earlier_names(run_id: str) -> dict[str, str]:
    """The names that earlier attempts of a run resolved; none if there was no attempt."""
    with suppress(NotFound):
        return read(run_id).resolved
    return {}


def runs() -> list[RunRecord]:
    """All runs of this ALIGN_HOME, the latest last."""
    records = []
    for path in (align_home() / "runs").glob(f"*/{RUN}"):
        with suppress(NotFound):
            records.append(read(path.parent.name))
    return sorted(records, key=lambda record: (record.started_at, record.run_id))  # times are in milliseconds: they tie


def find(text: str) -> RunRecord:
    """The run that ``text`` means: an id, the first digits of one, a name (its latest run), or ``last``. Raises UserError."""
    known = runs()
    if not known:
        raise UserError(f"no run yet in {align_home()}; set ALIGN_HOME to the folder of your runs")
    chosen = known[-1:] if text == LAST else [record for record in known if record.run_id.startswith(text)]
    chosen = chosen or [record for record in known if record.name == text][-1:]
    if len(chosen) == 1:
        return chosen[0]
    shown = ", ".join(f"{short_id(record.run_id)} ({record.name})" for record in (chosen or known)[-5:])
    problem = "matches several runs" if chosen else "is not a run"
    raise UserError(f"{text!r} {problem}; give the first digits of one of: {shown}")


def news(folder: Path) -> list[dict[str, Any]]:
    """All lines about the stages of a run, oldest first. ``folder`` is the run's."""
    entries, path = [], folder / STAGES
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):  # cut by a kill, or by a full disk
            entries.append(json.loads(line))
    return entries


def stages(run_id: str) -> dict[str, StageLine]:
    """Outcome of each stage, by label, in the order in which they first appeared.

    A stage without a key is left out: the lines with it are lost.
    """
    contents: dict[str, dict[str, Any]] = {}
    for entry in news(folder_of(run_id)):
        contents.setdefault(entry["label"], {}).update(entry)
    lines = {}
    for label, content in contents.items():
        with suppress(ValidationError):
            lines[label] = StageLine.model_validate(content)
    return lines


def progress(run_id: str) -> dict[str, StageProgress]:
    """Progress of the stages in the last attempt, by label."""
    return _by_label(run_id, PROGRESS, StageProgress)


def in_use(but: str = "") -> set[str]:
    """Keys of stages and references (as text) of all live runs ``but`` one."""
    alive = (record.run_id for record in runs() if record.run_id != but and is_alive(record))
    lines = (line for run_id in alive for line in stages(run_id).values())
    return {used for line in lines for used in (line.key, *line.outputs.values())}


def waits(run_id: str) -> dict[str, StageWait]:
    """The waits of stages, by label."""
    return _by_label(run_id, WAITS, StageWait)


def _by_label(run_id: str, file: str, kind: type[M]) -> dict[str, M]:
    try:
        content = json.loads((folder_of(run_id) / file).read_text())
        return {label: kind.model_validate(entry) for label, entry in content.items()}
    except (OSError, ValueError):  # none yet, or cut by a power failure
        return {}


def prune(days: float) -> int:
    """Remove the journals of runs that no process had open for these ``days``; returns their number."""
    before = time.time() - days * 24 * 3600
    pruned = 0
    for path in (align_home() / "runs").glob(f"*/{LOCK}"):
        with suppress(OSError), path.open("ab") as lock_file:
            if (path.parent / STAGES).stat().st_mtime < before and lock(lock_file):
                shutil.rmtree(path.parent)
                pruned += 1
    return pruned


def status_of(record: RunRecord) -> str:
    """The status of a run; ``died`` if it is recorded as running and its process is gone."""
    return "died" if record.status == "running" and not is_alive(record) else record.status


def is_alive(record: RunRecord) -> bool:
    """Whether the run's process is alive, in any container: it holds the run's lock."""
    with suppress(FileNotFoundError):
        return is_locked(folder_of(record.run_id) / LOCK)
    return False


def stop_seconds(record: RunRecord) -> float:
    """Seconds that the run's stages have to save their progress."""
    return extended(float(record.recipe["resources"]["stop_seconds"]), folder_of(record.run_id))


def end_process(record: RunRecord, grace: float) -> bool:
    """Make sure that the run's process is dead; True if it had to be ended. Raises EnvironmentFault if it cannot be.

    SIGTERM comes first and leaves ``grace`` seconds to save its work, then SIGKILL. The process is looked up again for each
    signal, so that none reaches another process that got the same id.
    """
    if not is_alive(record):
        return False
    if record.find() is None:
        raise EnvironmentFault(
            f"run {record.run_id} is running where this process cannot end it, in another container or on another "
            f"machine ({record.machine}, process {record.pid}); end it there"
        )
    for signal, seconds in ((psutil.Process.terminate, grace + END_SECONDS), (psutil.Process.kill, END_SECONDS)):
        process = record.find()
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                signal(process)
        if wait_until(lambda: not is_alive(record), seconds):
            return True
    raise EnvironmentFault(f"the process {record.pid} of run {record.run_id} does not end; end it by hand")
