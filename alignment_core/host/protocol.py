"""Messages between the flow and the run host: one JSON object per line over a socket pair."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from socket import socket
from typing import Any

from alignment_core import errors
from alignment_core.artifacts.os_errors import machine_fault
from alignment_core.credentials import cut

RAY_DIED = 75
"""Exit code of a host that ends because one of Ray's daemons died: temporary failure in ``sysexits.h``."""


class Channel:
    """One end of the connection. ``send`` is safe from several threads; ``messages`` is for one."""

    def __init__(self, end: socket) -> None:
        self.end = end
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError if the other side is gone."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self.end.sendall(line)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Messages until the other side closes or dies."""
        with self.end.makefile("rb") as lines:
            try:
                for line in lines:
                    yield json.loads(line)
            except (ConnectionResetError, json.JSONDecodeError):
                return


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain data, without secrets; the type is kept if it is one of :mod:`alignment_core.errors`."""
    known = error if isinstance(error, errors.AlignmentError) else machine_fault(error)
    if known is None:
        return {"kind": "AlignmentError", "message": cut(f"{type(error).__name__}: {error}")}
    return {"kind": type(known).__name__, "message": cut(str(known))}


def rebuild(described: dict[str, Any]) -> errors.AlignmentError:
    """The error of a description by :func:`describe`."""
    kind = getattr(errors, described["kind"], errors.AlignmentError)
    return kind(described["message"])
