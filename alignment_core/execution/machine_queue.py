"""A queue over runs: one run at a time uses this machine's devices, first come, first served."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from alignment_core.artifacts.permissions import make_like_parent
from alignment_core.artifacts.workspace import open_lock
from alignment_core.execution.scheduling import RunName, Ticket
from alignment_core.processes import boot_id, lock

POLL_SECONDS = 0.2
SILENT_SECONDS = 2.0
"""After this time a stage reports that it waits, even if the holder is unknown."""
UNKNOWN = "the machine: another run uses it"

log = logging.getLogger(__name__)


class MachineQueue:
    """This process's (one run's) access to the devices of the machine. Use from several threads.

    A stage that needs the devices takes a slot in the queue. The stage with the oldest slot enters as soon as its run has the
    machine or the machine is free. So the stages of one run use it together, and none enters any more once another run waits.
    Between its stages a run keeps the machine until another one wants it; ``give_up`` is called then.

    Slots and the machine are files on which their owners hold kernel locks (flock), because those are released however a
    process ends.
    """

    def __init__(self, folder: Path, give_up: Callable[[], None] = lambda: None) -> None:
        """``folder`` is the same for all runs of a machine; several machines may share it."""
        name = boot_id()
        self._slots = make_like_parent(make_like_parent(folder) / f"{name}.queue")
        self._machine = folder / f"{name}.lock"
        self._holder = folder / f"{name}.json"
        self._numbering = folder / f"{name}.numbers"
        self._give_up = give_up
        self._condition = threading.Condition()
        self._lock: IO[bytes] | None = None
        self._users: list[Ticket] = []
        self._owner = uuid.uuid4().hex
        """Distinguishes files of this object from those of others."""
        self._run = RunName()
        self._mine: set[Path] = set()

    @contextmanager
    def use(self, ticket: Ticket) -> Iterator[None]:
        """Use the machine; waits without a deadline, and reports the reason to the ticket."""
        with self._slot(ticket) as slot:
            reported = None
            since = time.monotonic()
            while not self._enter(slot, ticket):
                silent = time.monotonic() - since > SILENT_SECONDS
                reason = self._reason() or reported or (UNKNOWN if silent else None)
                if reason != reported:
                    ticket.waits(reason)
                    reported = reason
                time.sleep(POLL_SECONDS)
        try:
            if reported is not None:
                ticket.waits(None)
            yield
        finally:
            self._leave(ticket)

    @contextmanager
    def use_if_free(self, ticket: Ticket) -> Iterator[bool]:
        """Use the machine if no other run has it or waits for it; yields whether it does."""
        with self._slot(ticket) as slot:
            entered = self._enter(slot, ticket)
        try:
            yield entered
        finally:
            if entered:
                self._leave(ticket)

    def _enter(self, slot: Path, ticket: Ticket) -> bool:
        with self._condition:
            if self._first() != slot:
                return False
            if self._lock is None:
                self._lock = _locked(open_lock(self._machine))
                if self._lock is None:
                    return False
                threading.Thread(target=self._watch, daemon=True).start()
            self._users.append(ticket)
            self._run = ticket.run
            self._write_holder()
            return True

    def _leave(self, ticket: Ticket) -> None:
        with self._condition:
            self._users.remove(ticket)
            self._write_holder()
            self._condition.notify_all()

    def _watch(self) -> None:
        """Release the machine when another run waits and no stage of this run uses it."""
        with self._condition:
            while self._users or not self._another_is_first():
                self._condition.wait(POLL_SECONDS)
            assert self._lock is not None
            try:
                self._give_up()
            except Exception:
                # Keep going: a machine that is never released would block all other runs.
                log.exception("not all actors on the machine could be ended before it was handed to another run")
            with contextlib.suppress(OSError):
                self._holder.unlink()
            self._lock.close()
            self._lock = None
            self._condition.notify_all()

    # ---------------------------------------------------------------- slots

    @contextmanager
    def _slot(self, ticket: Ticket) -> Iterator[Path]:
        """A slot in the queue, sorted by age by its name, that names its owner. It is locked before it gets its name, so that
        no other run takes it for abandoned."""
        descriptor, temporary = tempfile.mkstemp(prefix="new-", dir=self._slots.parent)
        with os.fdopen(descriptor, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(descriptor, 0o644)  # runs of other users probe the lock
            with contextlib.suppress(OSError):  # a full disk: others do not see the owner's name, the stage continues
                file.write(self._description(ticket.run, [ticket.label]))
                file.flush()
            slot = self._enqueue(Path(temporary))
            try:
                yield slot
            finally:
                slot.unlink(missing_ok=True)
                with self._condition:
                    self._mine.discard(slot)

    def _enqueue(self, temporary: Path) -> Path:
        """Put a slot at the end of the queue. Its number follows the last one, because clocks can go backwards."""
        with self._condition, open_lock(self._numbering) as numbering:
            fcntl.flock(numbering, fcntl.LOCK_EX)
            last = max((int(slot.name.partition("-")[0]) for slot in self._slots.iterdir()), default=0)
            slot = self._slots / f"{last + 1:020d}-{os.getpid()}-{temporary.name}"
            self._mine.add(slot)
            os.rename(temporary, slot)
        return slot

    def _first(self) -> Path | None:
        """The oldest slot whose owner is alive; slots of dead owners are removed."""
        for slot in sorted(self._slots.iterdir()):
            if slot in self._mine:
                return slot
            with contextlib.suppress(FileNotFoundError):
                abandoned = _locked(slot.open("rb"))
                if abandoned is None:
                    return slot
                with abandoned:
                    slot.unlink(missing_ok=True)
        return None

    def _another_is_first(self) -> bool:
        first = self._first()
        return first is not None and first not in self._mine

    # ---------------------------------------------------------------- reasons

    def _write_holder(self) -> None:
        """Write the holder's name to a file, for stages that wait and for people."""
        with contextlib.suppress(OSError):  # a full disk: the reason is lost, the stage continues
            fresh = self._holder.with_suffix(f".{self._owner}")
            fresh.write_text(self._description(self._run, [ticket.label for ticket in self._users]))
            os.replace(fresh, self._holder)

    def _description(self, run: RunName, stages: list[str]) -> str:
        content = {"run": run.id, "recipe": run.recipe, "stages": stages, "pid": os.getpid(), "owner": self._owner}
        return json.dumps(content)

    def _reason(self) -> str | None:
        """The reason of a wait; None while the machine changes hands, and for slots of the same run."""
        with self._condition:
            is_ours = self._lock is not None
            first = self._first()
            is_mine = first in self._mine
        if not is_ours:
            holder = _read(self._holder)
            if holder is None or holder.get("owner") == self._owner or not holder.get("stages", True):
                return None
            return f"the machine: {_name(holder)} uses it for {_stages(holder)}" if holder else UNKNOWN
        if first is None or is_mine:
            return None
        earlier = _read(first)
        return f"the machine: {_name(earlier)} asked for it earlier for {_stages(earlier)}" if earlier else UNKNOWN


def _read(path: Path) -> dict[str, Any] | None:
    """A description that :meth:`MachineQueue._description` made; None if the file is missing, empty if it cannot be read."""
    try:
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) and {"run", "recipe", "stages", "owner"} <= content.keys() else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def _name(owner: dict[str, Any]) -> RunName:
    return RunName(owner["run"], owner["recipe"])


def _stages(owner: dict[str, Any]) -> str:
    return " and ".join(owner["stages"])


def _locked(file: IO[bytes]) -> IO[bytes] | None:
    """The open file, locked for this caller; None, and closed, if another process has locked it."""
    if lock(file):
        return file
    file.close()
    return None
