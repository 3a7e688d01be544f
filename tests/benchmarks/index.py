"""Time to list and traverse a store of 10,000 artifacts with its index, in a folder and in S3."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from alignment_core.artifacts import FileEntry, Manifest, Provenance, Reference, Store, open_store
from alignment_core.artifacts.paths import blob_path, manifest_path, stage_path
from alignment_core.canonical import canonical_json, digest_of
from alignment_core.home import align_home
from alignment_core.journal import Journal, new_record
from alignment_core.lineage import Graph, Tree
from tests.servers.s3 import S3Server

RUNS, ROUNDS = 200, 5
"""With the ten artifacts of a round: 10,000 artifacts, the last ones of a run some 20 stages behind its first ones."""
QUERIES, OPENED = 100, 40
ROUND = {
    "rollouts": ("generate", ("policy", "data")),
    "scores": ("score", ("rollouts", "reward")),
    "pairs": ("select", ("rollouts", "scores")),
    "logps": ("reference_logps", ("policy", "pairs")),
    "model": ("train_dpo", ("policy", "pairs", "logps")),
    "answers": ("generate", ("model", "data")),
    "verdicts": ("score", ("answers",)),
    "evaluation": ("evaluate", ("answers", "verdicts")),
    "report": ("report", ("evaluation",)),
    "card": ("card", ("report", "model")),
}
"""The outputs of a round: the stage and its inputs; the next round starts from its model."""
CODE = {f"alignment_core.module_{number}": digest_of(number) for number in range(30)}
"""So that records have the size of true ones, some 4 KB."""
BLOB = b"the same in all artifacts"


def objects() -> Iterator[tuple[str, bytes]]:
    """Paths and bytes of the whole store."""
    yield blob_path(hashlib.sha256(BLOB).hexdigest()), BLOB
    for run in range(RUNS):
        known = {name: _artifact(name, f"{run % 20}") for name in ("policy", "data", "reward")}
        for round_number in range(ROUNDS):
            for name, (stage, used) in ROUND.items():
                manifest = _artifact(name, f"{run}-{round_number}")
                yield manifest_path(manifest.digest), canonical_json(manifest)
                at = f"2026-11-{1 + run // 10:02}T{10 + run % 10}:{round_number:02}:{len(known):02}.000000+00:00"
                inputs = {role: known[role].reference for role in used}
                label, run_ids = f"round-{round_number + 1}/{name}", {"prefect": f"run-{run}"}
                parts = {"stage": stage, "version": 1, "stream": label, "code": CODE, "config": {"seed": run}}
                parts["inputs"] = {role: str(reference) for role, reference in inputs.items()}
                record = Provenance(
                    key=digest_of([run, label]),
                    stage=stage,
                    label=label,
                    key_parts=parts,
                    inputs=inputs,
                    outputs={name: manifest.reference},
                    run_ids=run_ids,
                    started_at=at,
                    finished_at=at,
                )
                yield stage_path(record.key), record.model_dump_json(indent=2).encode()
                known[name] = manifest
            known["policy"] = known["model"]


def _artifact(name: str, of: str) -> Manifest:
    entry = FileEntry(path=f"{name}-{of}.bin", size=len(BLOB), sha256=hashlib.sha256(BLOB).hexdigest())
    return Manifest(kind="model" if name == "policy" else name, files=(entry,))


def fill(store: Store) -> None:
    """Put all objects, many at a time."""
    root = store.workspace.root if "://" not in store.uri else None

    def put(item: tuple[str, bytes]) -> None:
        path, data = item
        if root is None:
            store.backend.put(path, data)
        else:  # without the promise that it survives power loss
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, objects()))


def measured(uri: str) -> dict[str, Any]:
    """Seconds to build an index, and then of queries; each begins with a listing of the store."""
    store = open_store(uri, writes=False)
    took: dict[str, Any] = {"artifacts": RUNS * ROUNDS * len(ROUND)}
    took["first index"] = {name: round(cost, 2) for name, cost in cost_of(store.summaries).items()}
    makers = [record.output for record in store.records.all()]
    chosen = random.Random(0).sample(makers, QUERIES)
    deepest = _artifact("card", f"{RUNS - 1}-{ROUNDS - 1}").reference
    with Graph.of(store) as graph:
        took["ancestors of the last"] = len(ancestors(graph, deepest))
    took["ancestors, ms"] = _spread([cost_of(partial(_up, store, reference)) for reference in chosen])
    opened = []
    for target in chosen[:OPENED]:
        with Graph.of(store) as graph:
            opened.append(cost_of(partial(Tree, graph, target, upward=True)))
    took["ancestors in an open graph, ms"] = _spread(opened)
    run_id = _journal(store)
    where = ["--store", uri]
    commands = {
        "align artifacts ls": ["artifacts", "ls", *where],
        "align lineage": ["lineage", str(deepest), *where],
        "align explain": ["explain", run_id],
    }
    for name, arguments in commands.items():
        costs = [cost_of(partial(run_align, arguments)) for _ in range(5)]
        took[name] = {part: round(min(cost[part] for cost in costs), 2) for part in costs[0]}
    return took


def _up(store: Store, reference: Reference) -> None:
    with Graph.of(store) as graph:
        Tree(graph, reference, upward=True)


def ancestors(graph: Graph, reference: Reference) -> set[Reference]:
    waiting, seen = [reference], set[Reference]()
    while waiting:
        parents = {parent for _, parent in graph.parents(waiting.pop())} - seen
        seen |= parents
        waiting += parents
    return seen


def _journal(store: Store) -> str:
    """The journal of a run that would have made the last round again, with another seed."""
    record = new_record("f" * 32, "bench", {}, store.uri)
    with Journal(record).open() as journal:
        for number, stage_record in enumerate(list(store.records.all())[: len(ROUND) * ROUNDS]):
            parts = {**stage_record.key_parts, "config": {"seed": RUNS}}
            journal.stage(
                stage_record.label, "running", stage=stage_record.stage, key=digest_of(number), key_parts=parts
            )
            journal.stage(
                stage_record.label, "run", outputs={"model": str(stage_record.output)}, made_by=stage_record.key
            )
    return record.run_id


def cost_of(work: Callable[[], object]) -> dict[str, float]:
    """Seconds, and processor seconds including children; other load adds to the former."""
    began, before = time.perf_counter(), os.times()
    work()
    after = os.times()
    return {"seconds": time.perf_counter() - began, "processor_seconds": sum(after[:4]) - sum(before[:4])}


def run_align(arguments: list[str]) -> None:
    subprocess.run(
        [sys.executable, "-m", "alignment.flows.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def _spread(costs: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds; ``os.times`` counts in hundredths of a second, so only the mean of processor time is reported."""
    ordered = sorted(cost["seconds"] for cost in costs)
    spread = {name: ordered[int(part * len(ordered))] for name, part in (("p50", 0.5), ("p95", 0.95))}
    spread["processor"] = sum(cost["processor_seconds"] for cost in costs) / len(costs)
    return {name: round(1000 * seconds, 1) for name, seconds in spread.items()}


def main() -> None:
    """A line for the folder, and one for S3."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        os.environ["ALIGN_HOME"] = f"{place}/home"
        align_home()
        folder = open_store(f"{place}/store")
        fill(folder)
        print(json.dumps({"store": "folder", **measured(folder.uri)}), flush=True)
        server = S3Server(Path(place) / "s3").start()
        try:
            os.environ |= server.environment()
            server.make_bucket("bench")
            bucket = open_store("s3://bench/store")
            fill(bucket)
            print(json.dumps({"store": "s3", **measured(bucket.uri)}), flush=True)
        finally:
            server.end()


if __name__ == "__main__":
    main()
