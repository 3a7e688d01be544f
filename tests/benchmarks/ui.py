"""Processor time and size of the pages of `align ui` over 10,000 artifacts and 300 nights, in a folder and in S3."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from alignment.flows.ui.app import application
from alignment_core.artifacts import Provenance, Reference, Store, open_store
from alignment_core.canonical import digest_of
from alignment_core.evaluation.gates import judged
from alignment_core.home import align_home
from alignment_core.journal import Journal, new_record
from alignment_core.lineage.decision import Decision, record
from alignment_core.lineage.diff import compare
from alignment_core.nights.ledger import History, Night
from alignment_core.recipes import Gate
from tests.benchmarks.index import ROUND, ROUNDS, RUNS, cost_of, fill, run_align
from tests.servers.s3 import S3Server

NIGHTS = 300
LONG = 1000
"""Nights of the tree in the terminal."""
LAPS = 5
BEGINS = datetime.fromisoformat("2026-01-01T02:00:00+00:00")
NIGHT = (
    ("generate", "rollouts", {"policy": "model"}),
    ("score", "scores", {"rollouts": "rollouts"}),
    ("select_pairs", "dataset", {"rollouts": "rollouts", "scores": "scores"}),
    ("reference_logps", "reference-logps", {"data": "dataset", "model": "model"}),
    ("dpo", "model", {"data": "dataset", "model": "model", "reference_logps": "reference-logps"}),
)
JOURNALS = 200


def fill_nights(store: Store, nights: int, tag: str, decisions: bool) -> Reference:
    """Nights of a round each; the last policy. With ``decisions``, each moves the tag and has an entry in a ledger."""
    with store.workspace.scratch() as scratch:
        policy = _published(store, scratch, "model", tag)
        history = History(store, tag.replace("/", "-"))
        current: Reference | None = None
        for number in range(nights):
            at = (BEGINS + timedelta(days=number)).isoformat(timespec="milliseconds")
            made = {"model": policy}
            for stage, kind, roles in NIGHT:
                output = _published(store, scratch, kind, f"{tag} {number} {stage}")
                stage_record = Provenance(
                    key=digest_of([tag, number, stage]),
                    stage=stage,
                    label=f"round-1/{stage}",
                    inputs={role: made[used] for role, used in roles.items()},
                    outputs={kind: output},
                    metrics={"accuracy": 0.9, "loss": 0.5},
                    run_ids={"prefect": f"{number:08}-night"},
                    started_at=at,
                    finished_at=at,
                )
                store.records.put(stage_record)
                made[kind] = output
            policy = made["model"]
            if decisions:
                gates = tuple(judged((Gate(metric="accuracy", min=0.5),), {"accuracy": 0.9}, {}, "nothing"))
                decision = Decision(tag=tag, policy=policy, previous=current, passed=True, gates=gates)
                store.tags.move(tag, policy, current, "gates passed: accuracy 0.9", decision=record(store, decision))
                history.record(Night(night=at, state="promoted", rows=1000, candidate=policy, production=current))
            current = policy
    return policy


def _published(store: Store, scratch: Path, kind: str, content: str) -> Reference:
    folder = scratch / digest_of([kind, content])[:16]
    folder.mkdir()
    (folder / "content").write_text(content)
    return store.publish(folder, kind)


def fill_journals(store: Store) -> None:
    """Runs of this home, each with ten stages."""
    for number in range(JOURNALS):
        run = new_record(f"{number:08}-bench", "bench", {"name": "bench"}, store.uri)
        with Journal(run).open() as journal:
            for stage in range(10):
                parts = {"stage": "sft", "inputs": {}}
                journal.stage(f"sft-{stage}", "run", stage="sft", key=digest_of([number, stage]), key_parts=parts)


def pages(store: Store, policy: Reference, model: Reference) -> dict[str, Any]:
    """Median processor milliseconds and bytes of each page, after the first answer."""
    tabs = ("", "/touched", "/changed", "/promoted", "/files")
    paths = {
        "artifacts": "/artifacts",
        "artifacts, page 100": "/artifacts?from=4950",
        "search by label": "/artifacts?q=round-3/model",
        "search by digest": f"/artifacts?q={model.digest[:10]}",
        "search by tag": "/artifacts?q=policy/",
        "nothing found": "/artifacts?q=no-such-artifact",
        **{f"model{tab}": f"/artifacts/{model}{tab}" for tab in tabs},
        **{f"policy of 300 nights{tab}": f"/artifacts/{policy}{tab}" for tab in tabs},
        "runs": "/runs",
        "run": "/runs/00000000-bench",
        "nights": "/nights",
        "labels": "/labels",
    }
    figures: dict[str, Any] = {}
    unchanged = application(store, "token-of-a-benchmark", seconds=3600)  # a renewal beside it would count, too
    with TestClient(unchanged, base_url="http://127.0.0.1") as client:
        for name, path in paths.items():
            answer = client.get(path)
            assert answer.status_code == 200, answer.text
            costs = [_processor(partial(client.get, path)) for _ in range(LAPS)]
            figures[name] = {
                "ms": round(1000 * statistics.median(costs), 1),
                "kB": round(len(answer.content) / 1000, 1),
            }
    return figures


def _processor(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def compared(store: Store) -> float:
    """Processor milliseconds to compare two models of the 10,000, with a listing of the store."""
    makers = [made for made in store.records.all() if made.stage == "train_dpo"]
    first, second = makers[0].output, makers[-1].output
    return round(1000 * min(_processor(lambda: compare(store, first, second)) for _ in range(LAPS)), 1)


def measured(store: Store) -> dict[str, Any]:
    fill(store)
    policy = fill_nights(store, NIGHTS, "policy/production", decisions=True)
    model = next(made.output for made in store.records.all() if made.stage == "train_dpo")
    took: dict[str, Any] = {
        "artifacts": RUNS * ROUNDS * len(ROUND),
        "nights": NIGHTS,
        "pages": pages(store, policy, model),
    }
    took["compare, ms"] = compared(store)
    return took


def tree(store: Store) -> dict[str, Any]:
    """Processor seconds of `align lineage` of the policy of 1,000 nights, collapsed and whole, with the start of Python."""
    policy = fill_nights(store, LONG, "policy/long", decisions=False)
    costs = {}
    for name, options in (("collapsed", []), ("--all", ["--all"])):
        command = ["lineage", str(policy), "--store", store.uri, *options]
        costs[name] = round(min(cost_of(partial(run_align, command))["processor_seconds"] for _ in range(3)), 2)
    return {"lineage of nights": LONG, "processor_seconds": costs}


def main() -> None:
    """A line for the folder, one for the long tree, and one for S3."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        os.environ["ALIGN_HOME"] = f"{place}/home"
        align_home()
        folder = open_store(f"{place}/store")
        fill_journals(folder)
        print(json.dumps({"store": "folder", **measured(folder)}), flush=True)
        print(json.dumps({"store": "folder", **tree(open_store(f"{place}/long"))}), flush=True)
        server = S3Server(Path(place) / "s3").start()
        try:
            os.environ |= server.environment()
            server.make_bucket("bench")
            print(json.dumps({"store": "s3", **measured(open_store("s3://bench/store"))}), flush=True)
        finally:
            server.end()


if __name__ == "__main__":
    main()
