"""Losing whole machines: all processes of a run die at once, its ALIGN_HOME is gone, and it resumes from the store alone."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.align import prefect_server
from tests.crash.campaign import LONGEST_ATTEMPT_SECONDS, ROOT
from tests.crash.outcome import Digests, digests, equal_digests
from tests.crash.recipe import command
from tests.processes import processes_of
from tests.servers.s3 import S3Server

PROGRESS = ["--set", "resources.progress=store"]
MOST_LOSSES_OF_A_RUN = 6
"""After them a run is left alone, so that many results are compared."""


@dataclass
class Machines:
    """Runs of the quickstart's small cut, each over one store and over as many machines as it loses."""

    folder: Path
    bucket: str
    rng: random.Random
    environment: Mapping[str, str]
    pause: tuple[float, float] = (8.0, 40.0)
    """Seconds that a machine lives, at least and at most, if its run is not over before."""
    say: Callable[[str], None] = print
    expected: Digests = field(default_factory=dict)
    losses: int = 0
    differences: list[str] = field(default_factory=list)

    def undisturbed(self) -> float:
        """A run in a folder, on one machine; seconds that it took."""
        began, home = time.monotonic(), self.folder / "undisturbed"
        process = self._start(home, str(home / "store"))
        assert process.wait(LONGEST_ATTEMPT_SECONDS) == 0, (home / "output.txt").read_text()[-3000:]
        self.expected = digests(home)
        shutil.rmtree(home)
        return time.monotonic() - began

    def run(self, losses: int) -> None:
        """Go on until so many machines were lost and every run that lost one has ended."""
        number = 0
        while self.losses < losses:
            self._one_run(number, min(losses, self.losses + MOST_LOSSES_OF_A_RUN))
            number += 1

    def _one_run(self, number: int, losses: int) -> None:
        for machine in range(losses - self.losses + 1):
            home = self.folder / f"run-{number}-machine-{machine}"
            process = self._start(home, f"s3://{self.bucket}/run-{number}")
            longest = self.rng.uniform(*self.pause) if self.losses < losses else LONGEST_ATTEMPT_SECONDS
            try:
                process.wait(longest)
            except subprocess.TimeoutExpired:
                _lose(home)
                process.wait()
                shutil.rmtree(home)
                self.losses += 1
                self.say(f"  machine {self.losses} is gone after {longest:.0f} s")
                continue
            assert process.returncode == 0, (home / "output.txt").read_text()[-3000:]
            wrong = equal_digests(home, self.expected)
            self.differences += [f"run {number}: {difference}" for difference in wrong]
            self.say(f"run {number}: {self.losses} machines lost so far, {'; '.join(wrong) or 'nothing wrong'}")
            shutil.rmtree(home)
            return
        raise AssertionError("the last machine was left alone, and did not end")

    def _start(self, home: Path, store: str) -> subprocess.Popen[bytes]:
        home.mkdir(parents=True)
        with (home / "output.txt").open("wb") as output:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "alignment.flows.cli.main",
                    *command("quickstart"),
                    *PROGRESS,
                    "--store",
                    store,
                    "--json",
                ],
                cwd=ROOT,
                env={**os.environ, **self.environment, "ALIGN_HOME": str(home)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def _lose(home: Path) -> None:
    """Kill all processes of a home, as a machine that loses its power does."""
    while running := processes_of(home):
        for pid in running:
            try:
                psutil.Process(pid).kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)


def lose_machines(losses: int, seed: int) -> int:
    """Run the campaign and print its outcome; 1 if a digest differs."""
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        folder = Path(name)
        server = S3Server(folder / "s3").start()
        try:
            server.make_bucket("bucket")
            with prefect_server(folder / "server") as prefect:
                environment = {**server.environment(), **prefect}
                campaign = Machines(folder, "bucket", random.Random(seed), environment)
                campaign.say = lambda text: print(text, flush=True)
                print(f"seed {seed}; an undisturbed run takes {campaign.undisturbed():.0f} s", flush=True)
                campaign.run(losses)
        finally:
            server.end()
    print("\n".join(campaign.differences) or f"{campaign.losses} machines lost without a difference")
    return 1 if campaign.differences else 0
