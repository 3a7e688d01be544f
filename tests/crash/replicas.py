"""Replicas of an endpoint that rewards, in processes that may be killed: each is there again a moment later.

``python -m tests.crash.replicas PORT`` is one of them; it ends when its standard input does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.processes import free_port
from tests.rewards.reward_server import Server

AWAY_SECONDS = 1.5
"""How long a replica that was killed stays away."""


class Replica:
    """A port of this machine behind which a process answers, or another one soon."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/score"
        self._closed = threading.Event()
        self._start()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _start(self) -> None:
        command = [sys.executable, "-m", __name__, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        self.process.stdout.readline()  # it listens

    def _keep(self) -> None:
        while True:
            self.process.wait()
            if self._closed.wait(AWAY_SECONDS):
                return
            self._start()

    def close(self) -> None:
        """End it for good."""
        self._closed.set()
        self.process.kill()
        self._keeper.join()


@contextmanager
def replicas(count: int) -> Iterator[list[Replica]]:
    """So many of one endpoint."""
    with ExitStack() as stack:
        created = [Replica() for _ in range(count)]
        for replica in created:
            stack.callback(replica.close)
        yield created


def answer(content: dict[str, Any]) -> tuple[int, bytes]:
    """A tenth of the share of different letters in a completion; 1 for every completion of each fourth prompt or so, which
    the recipe's filter is to leave out."""
    shares = [len(set(completion)) / max(1, len(completion)) / 10 for completion in content["completions"]]
    easy = [zlib.crc32(prompt.encode()) % 4 == 0 for prompt in content["prompts"]]
    rewards = [1.0 if always else share for always, share in zip(easy, shares, strict=True)]
    return 200, json.dumps({"rewards": rewards}).encode()


if __name__ == "__main__":
    Server(answer, int(sys.argv[1]))
    print("listens", flush=True)
    sys.stdin.read()
