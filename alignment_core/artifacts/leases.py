"""Leases: locks between machines, kept as objects of the store and timed by the store's own clock.

A holder renews its lease while it works. A holder on this machine is alive as long as the kernel has its process; a holder on
another machine counts as dead when its lease is older than its time to live. Clocks of machines are never compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from alignment_core.artifacts.backend import Backend, Object
from alignment_core.artifacts.paths import COLLECTOR, LEASES, PUBLICATIONS
from alignment_core.errors import Conflict, InfrastructureError, NotFound, UserError
from alignment_core.processes import ProcessId

log = logging.getLogger(__name__)

SECONDS, SECONDS_FEW_WRITES = 60.0, 1800.0
"""Time to live of a lease after its last renewal; the longer one for storage that takes few writes an hour."""
_SHORTEST_WAIT, _LONGEST_WAIT = 0.01, 1.0


class Lease(BaseModel):
    """The content of a lease."""

    model_config = ConfigDict(frozen=True)

    owner: str = Field(description="name of the holder, for people")
    process: ProcessId = Field(description="the process that renews the lease")
    seconds: float = Field(gt=0, description="time to live from the last renewal, by the store's clock")
    protects: tuple[str, ...] = Field(default=(), description="digests that the collector must not delete")
    renewals: int = Field(default=0, ge=0, description="number of renewals")
    token: str = Field(default="", description="unique, so that two leases never have the same version")
    ended: bool = Field(
        default=False,
        description="whether its holder is done; the collector keeps what it protects while the lease is young",
    )


class HeldLease:
    """A lease that this process holds, renewed by a thread until ``release``."""

    def __init__(self, backend: Backend, path: str, lease: Lease, version: str, began: float) -> None:
        self.backend = backend
        self.path = path
        self.lease = lease
        self._version = version
        # before the request, so that this process counts its lease as lost no later than others do
        self._renewed = began
        self._version_is_known = True
        self._stopping = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._renew_often, name=f"lease {path}", daemon=True)
        self._thread.start()

    def is_lost(self) -> bool:
        """Whether others may count this holder as dead by now. Two thirds of the time to live leave room for a slow request."""
        return self._lost or time.monotonic() - self._renewed > self.lease.seconds * 2 / 3

    def check(self) -> None:
        """Raise Conflict if the lease is lost: the work under it must stop."""
        if self.is_lost():
            raise Conflict(
                f"{self.path} in {self.backend.uri} was not renewed in time, so that others may have taken over from "
                f"this process: was it stopped, or the store unavailable, for {self.lease.seconds:.0f} seconds? Start it again"
            )

    def stop(self) -> None:
        """Stop renewing. The lease protects until this process has ended and the lease has expired."""
        self._stopping.set()
        self._thread.join()

    def release(self, remove: bool = True) -> None:
        """Stop renewing, and delete the lease; without ``remove`` the collector deletes it later, and keeps what it protects
        while it is young."""
        self.stop()
        if not remove:
            self._write(ended=True)
        elif not self._lost and (self._version_is_known or self._find_version()):
            self.backend.delete(self.path, self._version)  # conditional: a process that took the lease over keeps it

    def _renew_often(self) -> None:
        # Several renewals fit into the time to live, so that one failed or slow request does not lose the lease.
        while not self._lost and not self._stopping.wait(self.lease.seconds / 6):
            try:
                self._write()
            except Exception as error:  # survive an outage: `check` raises when no renewal succeeds in time
                log.warning("a lease could not be renewed: %s", error)

    def _write(self, ended: bool = False) -> None:
        lease = self.lease.model_copy(update={"renewals": self.lease.renewals + 1, "ended": ended})
        for _ in range(2):  # again if only the known version was wrong, after a renewal whose answer was lost
            began = time.monotonic()
            self._version_is_known = False
            version = self.backend.put(self.path, lease.model_dump_json().encode(), replaces=self._version)
            if version is not None:
                self._version = version
                self._version_is_known = True
                self._renewed = began
                self.lease = lease
                return
            if not self._find_version():
                self._lost = True
                return

    def _find_version(self) -> bool:
        """Take the version of the stored lease; False if that is another lease. A renewal whose answer was lost changed it."""
        stored = self.backend.stat(self.path)
        lease = Leases(self.backend).read(stored) if stored is not None else None
        if stored is None or lease is None or lease.token != self.lease.token:
            return False
        self._version = stored.version
        self._version_is_known = True
        return True


class Leases:
    """The leases of one store."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def acquire(self, path: str, owner: str = "", protects: Collection[str] = ()) -> HeldLease | None:
        """Acquire the lease at ``path``; None when a holder that is alive has it."""
        lease = Lease(
            owner=owner or f"process {os.getpid()} on {socket.gethostname()}",
            process=ProcessId.mine(),
            seconds=SECONDS_FEW_WRITES if self.backend.few_writes else SECONDS,
            protects=tuple(sorted(protects)),
            token=uuid.uuid4().hex,
        )
        began = time.monotonic()
        data = lease.model_dump_json().encode()
        version = self.backend.put(path, data)
        if version is None:
            stored = self.backend.stat(path)
            if stored is None or self._is_alive(stored):
                return None
            began = time.monotonic()
            # Conditional on the dead holder's version: of several processes that replace the lease one wins.
            version = self.backend.put(path, data, replaces=stored.version)
        return None if version is None else HeldLease(self.backend, path, lease, version, began)

    @contextmanager
    def hold(
        self, path: str, owner: str = "", waits: Callable[[str | None], None] = lambda _: None
    ) -> Iterator[HeldLease]:
        """Acquire the lease at ``path`` as soon as it is free. ``waits`` is called with the owner's name when a wait begins,
        and with None when it is over."""
        waiting = False
        pauses = _pauses()
        while (lease := self.acquire(path, owner)) is None:
            if not waiting and (other := self.holder(path)) is not None:
                waiting = True
                waits(other.owner)
            time.sleep(next(pauses))
        try:
            if waiting:
                waits(None)
            yield lease
        finally:
            lease.release()

    def holder(self, path: str) -> Lease | None:
        """The lease at ``path``, if its holder is alive."""
        stored = self.backend.stat(path)
        return self.read(stored) if stored is not None and self._is_alive(stored) else None

    def read(self, stored: Object) -> Lease | None:
        """The lease in an object; None when the object is gone or holds no lease."""
        try:
            return Lease.model_validate_json(self.backend.read(stored.path))
        except (NotFound, ValidationError):
            return None

    @contextmanager
    def publication(self, digests: Collection[str], lasting: bool) -> Iterator[None]:
        """Protect objects from the collector from before they are written, or found to exist, until something refers to them.

        A ``lasting`` publication protects for a while longer: no record may refer to its artifact yet.
        """
        lease = self.acquire(f"{PUBLICATIONS}{uuid.uuid4().hex}.json", protects=digests)
        assert lease is not None
        done = False
        pauses = _pauses()
        try:
            while self.holder(COLLECTOR):  # it may have listed the leases before this one was written
                time.sleep(next(pauses))
            yield
            done = True
        finally:
            with contextlib.ExitStack() as quiet:
                if not done:  # the error that ended the publication is the one to raise
                    quiet.enter_context(contextlib.suppress(UserError, InfrastructureError))
                if done and self.backend.few_writes:  # a deletion would cost one of the few commits
                    lease.stop()
                else:
                    lease.release(remove=not (done and lasting))

    def protected(self, before: float) -> tuple[set[str], list[Object]]:
        """The digests protected by publications that are alive or younger than ``before``; and the expired leases."""
        digests = set[str]()
        expired = []
        for stored in self.backend.list(LEASES):
            if stored.path == COLLECTOR:
                continue
            lease = self.read(stored)
            if lease is not None and (stored.modified > before or self._is_alive(stored, lease)):
                digests |= set(lease.protects)
            else:
                expired.append(stored)
        return digests, expired

    def _is_alive(self, stored: Object, lease: Lease | None = None) -> bool:
        lease = lease or self.read(stored)
        if lease is None or lease.ended:
            return False
        lives = lease.process.lives()  # None for a process of another machine
        return self.backend.now() - stored.modified <= lease.seconds if lives is None else lives


def _pauses() -> Iterator[float]:
    """Seconds between polls: jittered exponential backoff, so that no waiting process is starved by a faster one."""
    pause = _SHORTEST_WAIT
    while True:
        yield random.uniform(0.5, 1.0) * pause
        pause = min(2 * pause, _LONGEST_WAIT)
