"""Follow the log of a run host: its new lines with their stage and rank."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO

from alignment_core.printable import without_colours

OnLines = Callable[[str | None, str, str], None]
"""Called with the stage (none if it is not known), the origin and the text: one line, or several that were written
together, such as a traceback. The origin is an actor with its rank (``trainers[0]``), ``host`` or ``raylet``."""

POLL_SECONDS = 0.5
CHUNK_BYTES = 1 << 20
LONGEST_LINE = 2000
LINES_PER_SECOND = 50.0
BURST = 500.0
"""Lines in a burst; lines beyond this and ``LINES_PER_SECOND`` are only counted."""
KEPT = 50
"""Number of logs of runs that are kept."""

_ACTOR = re.compile(r"\((?:(?P<actor>\S+) )?pid=\d+(?:, ip=[^)]+)?\) ?(?P<text>.*)")
_DAEMON = re.compile(r"\((?P<daemon>raylet|gcs_server)(?:, ip=[^)]+)?\) ?(?P<text>.*)")
_SERVES = re.compile(r"\[align\] (?P<group>\w+) serve (?P<label>.*)")
_OF_A_HEALTHY_RUN = re.compile(
    "Token authentication is enabled for this Ray cluster"
    "|Setting accelerator to CPU. If you have GPU"
    "|Triton not available, find_triton_kernels"
    "|Warning: NUMA binding: Using MEMBIND policy"
)
"""Messages of libraries that no log level suppresses; they stay in the file."""


class LogTail:
    """Forwards lines of ``log`` after its first ``start`` bytes from a thread; ``close`` forwards the rest.

    Missing files and failing listeners are ignored, and the run never waits for it.
    """

    def __init__(self, log: Path, start: int, on_lines: OnLines) -> None:
        self.log = log
        self._start = start
        self._on_lines = on_lines
        self._file: BinaryIO | None = None
        self._rest = b""
        self._serving: dict[str, str] = {}
        self._allowance = BURST
        self._counted_at = time.monotonic()
        self._left_out = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Forward all complete and incomplete lines, and stop. May be called again."""
        self._closing.set()
        self._thread.join(10.0)

    def _follow(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(POLL_SECONDS)
            with contextlib.suppress(Exception):
                while self._step():
                    pass
        with contextlib.suppress(Exception):
            self._forward(self._limited([self._rest.decode(errors="replace")], last=True))
        if self._file is not None:
            self._file.close()

    def _step(self) -> bool:
        """Forward one chunk. True if there may be another."""
        if self._file is None:
            if not self.log.exists():
                return False
            self._file = self.log.open("rb")
            self._file.seek(self._start)
        chunk = self._file.read(CHUNK_BYTES)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-CHUNK_BYTES:]
        self._forward(self._limited(line.decode(errors="replace") for line in lines))
        return len(chunk) == CHUNK_BYTES

    def _limited(self, lines: Iterable[str], last: bool = False) -> Iterator[tuple[str | None, str, str]]:
        """Stage, origin and text of the relevant lines, up to the rate limit."""
        now = time.monotonic()
        self._allowance = min(BURST, self._allowance + LINES_PER_SECOND * (now - self._counted_at))
        self._counted_at = now
        for line in lines:
            parsed = self._parse(line)
            if parsed is None:
                continue
            if self._allowance < 1:
                self._left_out += 1
                continue
            self._allowance -= 1
            yield parsed
        if self._left_out and (self._allowance >= 1 or last):
            left_out, self._left_out = self._left_out, 0
            yield None, "host", f"… {left_out} lines left out, see {self.log}"

    def _parse(self, line: str) -> tuple[str | None, str, str] | None:
        line = line.rstrip()
        served = _SERVES.fullmatch(line)
        if served is not None:
            self._serving[served["group"]] = served["label"]
            return None
        if not line.strip() or _OF_A_HEALTHY_RUN.search(line):
            return None
        stage, origin, text = None, "host", line
        if actor := _ACTOR.fullmatch(line):
            origin, text = actor["actor"] or "worker", actor["text"]
            group = "trainers" if origin.startswith("trainers[") else "engines"  # vLLM's own workers are engines, too
            stage = self._serving.get(group)
        elif daemon := _DAEMON.fullmatch(line):
            origin, text = daemon["daemon"], daemon["text"]
        text = without_colours(text.rpartition("\r")[2])  # of a progress bar the last state
        if not text.strip():
            return None
        if len(text) > LONGEST_LINE:
            text = f"{text[:LONGEST_LINE]} … ({len(text)} characters)"
        return stage, origin, text

    def _forward(self, lines: Iterable[tuple[str | None, str, str]]) -> None:
        for (stage, origin), together in groupby(lines, key=lambda line: line[:2]):
            with contextlib.suppress(Exception):
                self._on_lines(stage, origin, "\n".join(text for *_, text in together))


def prune_logs(folder: Path) -> None:
    """Delete the oldest logs of runs in ``folder``, all but the newest :data:`KEPT`."""
    logs = [path for path in folder.glob("*.log") if path.name != "prefect.log"]
    with contextlib.suppress(OSError):
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[: max(0, len(logs) - KEPT)]:
            path.unlink(missing_ok=True)
