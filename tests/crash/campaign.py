"""Killing random processes of a run at random moments, and comparing results with an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from alignment_core import journal
from alignment_core.execution.training_loop import REPORT_SECONDS
from tests.crash import recipe
from tests.crash.outcome import Comparison, Digests, digests, each_prompt_once, equal_digests
from tests.crash.replicas import Replica
from tests.processes import processes_of, role_of, wait_until

ROOT = Path(__file__).parents[2]
LONGEST_ATTEMPT_SECONDS = 600.0
LEFT_BEHIND_SECONDS = 90.0
MOST_KILLS_OF_A_RUN = 5
"""After them a run is left alone, so that its later stages are reached and many results are compared."""
SAVED = {
    "steps": "step-*/complete.json",
    "shards": "shard-*.parquet",
    "blocks": "*.npy",
}
"""Files in the progress of a stage that counts in this unit, once a part of its work is saved."""
UNREPORTED_SECONDS = REPORT_SECONDS + journal.PROGRESS_SECONDS
"""Maximum age of a run's progress report; if older, the run is not working but restarting."""
OF_AN_ENGINE = "VLLM_CPU_OMP_THREADS_BIND"
"""In the environment of an actor: it is an engine, and otherwise a trainer or a reward model."""


@dataclass
class Kill:
    """One process that was killed. ``unsaved``: seconds since the last checkpoint or shard of each stage under way, by unit."""

    role: str
    seconds: float
    unsaved: dict[str, float]
    survived: bool = True
    """Whether the run resumed by itself; otherwise the same command was run again."""


@dataclass
class Campaign:
    """Runs of one recipe in one folder, with the digests that all of them must give."""

    folder: Path
    command: list[str]
    """Arguments of ``align``."""
    rng: random.Random
    say: Callable[[str], None] = print
    longest_pause: float = 15.0
    """A kill comes at a random moment of so many seconds after the start, or after the kill before it."""
    begins_at: str = ""
    """Label of a stage that must have begun before processes are killed; None for any moment."""
    roles: Sequence[str] = ()
    """The role that is killed; None for all."""
    compare: Comparison = equal_digests
    replicas: Sequence[Replica] = ()
    """Victims beside the processes of a run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every run: of a Prefect server that all share, for one."""
    expected: Digests = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def undisturbed(self) -> float:
        """Run once without a kill and keep the digests; seconds that it took."""
        started = time.monotonic()
        home = self.folder / "undisturbed"
        if self._start(home).wait(LONGEST_ATTEMPT_SECONDS) != 0:
            raise AssertionError((home / "output.txt").read_text()[-3000:])
        self.expected = digests(home)
        return time.monotonic() - started

    def run(self, kills: int) -> None:
        """Go on until so many kills have happened and every run that met one has ended."""
        number = 0
        while len(self.kills) < kills:
            home = self.folder / f"run-{number}"
            self._one_run(home, min(kills, len(self.kills) + MOST_KILLS_OF_A_RUN))
            wrong = self.compare(home, self.expected)
            self.differences += [f"run {number}: {difference}" for difference in wrong]
            self.say(f"run {number}: {len(self.kills)} kills so far, {'; '.join(wrong) or 'nothing wrong'}")
            shutil.rmtree(home, ignore_errors=True)
            number += 1

    def _one_run(self, home: Path, kills: int) -> None:
        """One run until it is complete, disturbed until so many kills have happened in all."""
        attempts = 0
        while True:
            process = self._start(home)
            ended = self._disturb(process, home, kills)
            attempts += 1
            left = not wait_until(lambda: not processes_of(home), LEFT_BEHIND_SECONDS)
            if left:
                raise AssertionError(f"{home}: processes were left behind: {processes_of(home)}")
            if ended == 0:
                return
            if not self.kills or attempts > len(self.kills) + 1:
                raise AssertionError((home / "output.txt").read_text()[-3000:])
            self.kills[-1].survived = False

    def _disturb(self, process: subprocess.Popen[bytes], home: Path, kills: int) -> int:
        """Kill processes of this attempt now and then; its exit code."""
        deadline = time.monotonic() + LONGEST_ATTEMPT_SECONDS
        wait_until(lambda: process.poll() is not None or self._has_begun(home), LONGEST_ATTEMPT_SECONDS)
        while True:
            pause = self.rng.uniform(0.0, self.longest_pause) if len(self.kills) < kills else LONGEST_ATTEMPT_SECONDS
            try:
                return process.wait(pause)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    process.kill()
                    raise AssertionError(f"{home}: the run hangs; see {home / 'logs'}") from None
            self._kill(home)

    def _kill(self, home: Path) -> None:
        """Kill one process: first a role by lot, then one of its processes."""
        by_role: dict[str, list[int]] = {}
        for pid, line in processes_of(home).items():
            role = role_of(line)
            if role is not None:
                by_role.setdefault(_which_actor(pid) if role == "actor" else role, []).append(pid)
        if by_role and any(replica.process.poll() is None for replica in self.replicas):
            by_role["replica"] = [replica.process.pid for replica in self.replicas if replica.process.poll() is None]
        chosen = sorted(role for role in by_role if not self.roles or role in self.roles)
        if not chosen:
            return
        role = self.rng.choice(chosen)
        pid = self.rng.choice(sorted(by_role[role]))
        unsaved = _unsaved_seconds(home)
        try:
            psutil.Process(pid).send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self.kills.append(Kill(role, time.time(), unsaved))
        self.say(
            f"  kill {len(self.kills)}: {role}" + "".join(f", {s:.1f} s of {u} unsaved" for u, s in unsaved.items())
        )

    def _has_begun(self, home: Path) -> bool:
        """Whether this attempt is at the stage that kills wait for, or past it."""
        if not self.begins_at:
            return True
        folder = _newest_run(home)
        return folder is not None and self.begins_at in _progress(folder)

    def _start(self, home: Path) -> subprocess.Popen[bytes]:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "output.txt").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "alignment.flows.cli.main", *self.command, "--json"],
                cwd=ROOT,
                env={**os.environ, "ALIGN_HOME": str(home), **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def campaign_of(name: str, folder: Path, rng: random.Random, replicas: Sequence[Replica] = ()) -> Campaign:
    """Of the recipe with this name. Sampling ahead depends on the clock: it gives another policy each time it runs."""
    command = recipe.command(name, [replica.url for replica in replicas])
    compare = each_prompt_once if name in recipe.AHEAD_OF_TRAINING else equal_digests
    return Campaign(folder, command, rng, compare=compare, replicas=replicas if name != "quickstart" else ())


def _unsaved_seconds(home: Path) -> dict[str, float]:
    """Seconds of work that no checkpoint or shard holds, of the stages that the newest run is at, by their units."""
    folder = _newest_run(home)
    if folder is None:
        return {}
    try:
        seen, news = _progress(folder), (folder / journal.PROGRESS).stat().st_mtime
    except OSError:
        return {}
    keys = {line["label"]: line.get("key") if line["state"] == "running" else None for line in journal.news(folder)}
    unsaved: dict[str, float] = {}
    for label, progress in seen.items():
        unit = progress["unit"]
        if unit in SAVED and (key := keys.get(label)):
            safe = (home / "store" / "progress" / key).glob(SAVED[unit])
            newest = max(map(_modified, safe), default=0.0)
            working = progress["done"] != progress["total"]  # to publish is no work to lose
            until = min(time.time(), news + UNREPORTED_SECONDS * working)
            unsaved[unit] = max(0.0, unsaved.get(unit, 0.0), until - max(newest, progress["since"]))
    return unsaved


def _newest_run(home: Path) -> Path | None:
    records = sorted((home / "runs").glob(f"*/{journal.RUN}"), key=lambda path: path.stat().st_mtime)
    return records[-1].parent if records else None


def _progress(folder: Path) -> dict[str, Any]:
    """How far the stages of this run are that this attempt has reported of."""
    try:
        return json.loads((folder / journal.PROGRESS).read_text())
    except FileNotFoundError:
        return {}


def _which_actor(pid: int) -> str:
    try:
        return "engine" if OF_AN_ENGINE in psutil.Process(pid).environ() else "trainer"
    except psutil.Error:  # it has ended
        return "trainer"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # an older checkpoint, which the next one replaced just now
        return 0.0


def by_role(kills: list[Kill]) -> dict[str, dict[str, int]]:
    """Kills of each role, and how many of them the run resumed from by itself."""
    return {
        role: {
            "kills": sum(kill.role == role for kill in kills),
            "resumed": sum(kill.survived for kill in kills if kill.role == role),
        }
        for role in sorted({kill.role for kill in kills})
    }


def lost_work(kills: list[Kill]) -> dict[str, dict[str, float]]:
    """Kills during work of each unit, and the most seconds of it that were not saved."""
    unsaved = {unit: [kill.unsaved[unit] for kill in kills if unit in kill.unsaved] for unit in SAVED}
    return {
        unit: {"kills": len(seconds), "seconds": round(max(seconds), 1)} for unit, seconds in unsaved.items() if seconds
    }


def summary(kills: list[Kill]) -> str:
    """Killed roles, the number of automatic resumes, and lost work."""
    lines = [
        f"{role}: {of['kills']} kills, {of['resumed']} survived by the run itself"
        for role, of in by_role(kills).items()
    ]
    lines += [
        f"{unit} that were not saved: at most {lost['seconds']:.1f} s of work, in {lost['kills']} kills"
        for unit, lost in lost_work(kills).items()
    ]
    return "\n".join(lines)
