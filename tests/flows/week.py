"""Nights with a fake clock, in one process over one warm host: `python -m tests.flows.week HOME PART`.

PART is one of the functions below. Prints the outcome of every night as a line of JSON.
"""

from __future__ import annotations

import contextvars
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alignment.flows.service import environment
from alignment.flows.service.prefect_api import start_prefect_api

HOME = Path(sys.argv[1])
environment.prepare()
api = start_prefect_api()

from alignment.flows.deployment_flows import deployed_nightly  # noqa: E402
from alignment.flows.preflight import COMMAND_LINE, CommandLine  # noqa: E402
from alignment_core.artifacts import open_store  # noqa: E402 (Prefect reads its settings when it is imported)
from alignment_core.execution.base import StageCall, StageResult  # noqa: E402
from alignment_core.host.client import Host  # noqa: E402
from alignment_core.methods.nightly import NightlyRecipe  # noqa: E402
from alignment_core.recipes import DataConfig, DataSource, IterativeDpoConfig, load_recipe  # noqa: E402

recipe = load_recipe(HOME / "nightly.yaml")
assert isinstance(recipe, NightlyRecipe)
INBOX = HOME / "inbox"
ROUNDS = IterativeDpoConfig.model_validate(
    {
        "rounds": 1,
        "prompts": str(HOME / "rounds.jsonl"),
        "prompts_per_round": 12,
        "generation": {"num_generations": 4, "max_completion_length": 6},
        "selection": {"score": "verifier", "truncated": "keep"},
        "loss": {"nll_weight": 0.2},
        "training": {"batch_size": 6, "learning_rate": 1e-3},
    }
)


class WarmHost(Host):
    """Serves all nights: a Ray for each would cost ten seconds a night. Does something before a stage runs, once."""

    before: tuple[str, Callable[[], None]] | None = None

    def run(self, call: StageCall, *rest: Any, **options: Any) -> StageResult:
        if self.before and self.before[0] == call.label:
            (_, does), self.before = self.before, None
            does()
        return super().run(call, *rest, **options)

    def __exit__(self, *_: object) -> None:
        pass


class Nobody:
    """Watches a run and shows nothing of it."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


def drop(name: str, letters: str, count: int, first: int = 0, other: str = "") -> None:
    """Append pairs that prefer the one letter to the other."""
    rows = [
        {"prompt": f"{number}?", "chosen": letters[0] * 6, "rejected": letters[1] * 6}
        for number in range(first, first + count)
    ]
    with (INBOX / name).open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + other)


def night(name: str, **changes: Any) -> None:
    token = COMMAND_LINE.set(CommandLine(Nobody(), host))
    try:
        outcome = deployed_nightly(recipe.model_copy(update=changes), night=name)
        report = {"night": outcome["night"], "stages": {s["label"]: s["state"] for s in outcome["stages"]}}  # type: ignore[index]
    except Exception as error:
        report = {"error": str(error)}
    finally:
        COMMAND_LINE.reset(token)
    print(json.dumps({"name": name, **report}), flush=True)


def until_killed() -> None:
    drop("sunday.jsonl", "ab", 24, other='{"prompt": "no answers"}\n')
    drop("copy.jsonl", "ab", 24, other="{broken}\n")  # every row twice, and an invalid one
    night("night-1")
    night("night-2")  # nothing arrived
    drop("tuesday.jsonl", "ba", 24)  # the wrong way round
    night("night-3")
    drop("sunday.jsonl", "ab", 24, first=24)  # late, at the end of a file that was read before
    host.before = ("dpo", lambda: os.kill(os.getpid(), signal.SIGKILL))
    night("night-4")


def after_the_kill() -> None:
    drop("thursday.jsonl", "ab", 24, first=48)  # waits, while the rows of the killed night are trained on
    night("night-5")

    def overlap() -> None:
        drop("friday.jsonl", "ab", 24, first=72)
        other = threading.Thread(target=contextvars.Context().run, args=(night, "night-6b"))
        other.start()
        other.join()

    host.before = ("dpo", overlap)
    night("night-6")  # is overtaken before it has trained
    night("night-7", iterative_dpo=ROUNDS)
    gone = recipe.dpo.model_copy(update={"data": DataConfig(sources=(DataSource(path=str(HOME / "gone")),))})  # type: ignore[attr-defined]
    night("night-8", dpo=gone)


if __name__ == "__main__":
    store = open_store(recipe.store)
    if api:
        api.wait()
    host = WarmHost(store.uri, recipe.resources, HOME / "host.log")
    try:
        {"until_killed": until_killed, "after_the_kill": after_the_kill}[sys.argv[2]]()
    finally:
        host.close()
