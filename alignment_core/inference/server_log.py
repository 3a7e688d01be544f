"""Output of a vLLM server: the last lines, and the reason of a failed start among them."""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections import deque
from typing import IO

KEPT_LINES = 5000
LONGEST_CAUSE = 2000
"""Characters of a cause that a message shows."""
PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:(?P<level>[A-Z]+) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
EXCEPTION = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Fault|Failure): \S")
USAGE = re.compile(r"^[\w.-]+: error: (?P<reason>.+)")
"""Error of ``argparse`` about an option."""
WRAPPER = "Engine core initialization failed"
"""Error of vLLM's main process if another process failed."""


class ServerLog(threading.Thread):
    """Reads a server's output, so that its pipe never fills up."""

    def __init__(self, output: IO[bytes]) -> None:
        super().__init__(name="vLLM's log", daemon=True)
        self._output = output
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._shown = False
        self.start()

    def run(self) -> None:
        for line in self._output:
            text = line.decode(errors="replace")
            with self._lock:
                self._lines.append(text)
                shown = self._shown
            if shown:
                sys.stderr.write(text)
                sys.stderr.flush()

    def show(self) -> None:
        """Pass further lines on to standard error."""
        with self._lock:
            self._shown = True

    def text(self) -> str:
        """The last lines."""
        with self._lock:
            return "".join(self._lines)

    def save(self) -> str:
        """Write the last lines to a new file of this user, and return its path."""
        with tempfile.NamedTemporaryFile("w", prefix="align-vllm-", suffix=".log", delete=False) as file:
            file.write(self.text())
        return file.name


def root_cause(log: str) -> str | None:
    """The first exception of the log, with all of its message; None if there is none.

    Where one exception leads to another, Python prints the first one first. Indented lines continue a message.
    """
    lines = [_without_prefix(line) for line in log.splitlines()]
    for number, line in enumerate(lines):
        if line is None or WRAPPER in line:
            continue
        if usage := USAGE.match(line):
            return usage["reason"][:LONGEST_CAUSE]
        if EXCEPTION.match(line):
            return " ".join([line, *_continued(lines[number + 1 :])])[:LONGEST_CAUSE]
    return None


def _without_prefix(line: str) -> str | None:
    """The line without the name of the process and the time; None for warnings and notes."""
    prefix = PREFIX.match(line)
    if prefix is None:
        return line
    return line[prefix.end() :] if prefix["level"] in (None, "ERROR", "CRITICAL") else None


def _continued(lines: list[str | None]) -> list[str]:
    continued: list[str] = []
    for line in lines:
        if not line or not line.startswith(" ") or line.lstrip().startswith("File "):
            break
        continued.append(line.strip())
    return continued
