"""Tables of stores, their index and the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.benchmarks.results import Figure, Run
from tests.benchmarks.tables.markdown import lines, number, span, table

STORE = {
    "publish": "publish the file",
    "into_cache": "copy its blob into the cache",
    "digest": "compute its digest",
}
COMMANDS = {
    "align artifacts ls": "`align artifacts ls`, s",
    "align lineage": "`align lineage`, s",
    "align explain": "`align explain` of a run of 50 stages, s",
}


def store(runs: Sequence[Run]) -> str:
    rows = [[title, span(line[name] for line in lines(runs))] for name, title in STORE.items()]
    return table(("operation", "seconds"), rows)


def index(runs: Sequence[Run]) -> str:
    by_store = {line["store"]: line for line in lines(runs)}
    stores = [by_store["folder"], by_store["s3"]]

    def spread(figures: dict[str, Any]) -> str:
        return f"{number(figures['p50'])} / {number(figures['p95'])}"

    rows = [
        ["build the first index of a machine, s", *(number(line["first index"]["seconds"]) for line in stores)],
        [
            "ancestors of an artifact, with a listing of the store for each query: p50 / p95, ms",
            *(spread(line["ancestors, ms"]) for line in stores),
        ],
        [
            "the same in an open graph: p50 / p95, ms",
            *(spread(line["ancestors in an open graph, ms"]) for line in stores),
        ],
        *([title, *(number(line[name]["seconds"]) for line in stores)] for name, title in COMMANDS.items()),
    ]
    return table(("operation", "folder", "S3 on loopback"), rows)


def pages(runs: Sequence[Run]) -> str:
    first = {line["store"]: line for line in lines(runs) if "pages" in line}
    trees = next(line["processor_seconds"] for line in lines(runs) if "processor_seconds" in line)
    folder, s3 = first["folder"], first["s3"]
    rows = [
        [name, number(cost["ms"]), number(s3["pages"][name]["ms"]), number(cost["kB"])]
        for name, cost in folder["pages"].items()
    ]
    rows.append(
        [
            "comparison of two models, with a listing of the store",
            *(number(line["compare, ms"]) for line in (folder, s3)),
            "",
        ]
    )
    rows += [
        [f"`align lineage` of 1,000 nights, {name}", number(1000 * seconds), "", ""] for name, seconds in trees.items()
    ]
    return table(("page or command", "processor ms, folder", "S3", "kB"), rows)


def cached(runs: Sequence[Run]) -> str:
    (costs,) = [line for line in lines(runs) if "requests" in line]
    added = costs["added, seconds"]
    rows = [["requests", number(costs["requests"])], ["seconds more than in a folder, median", number(median(added))]]
    by_store = {line["store"]: line for line in lines(runs) if "store" in line}
    for name, title in (("folder", "a folder"), ("s3", "S3")):
        if name in by_store:
            rows.append(
                [f"seconds of the command in {title}, the least of {len(added)}", number(by_store[name]["seconds"])]
            )
    return table(("measurement", "result"), rows)


def hub(runs: Sequence[Run]) -> str:
    results = lines(runs)
    commits = span(line["commits"] for line in results)
    rows = [
        [f"publish, in {commits} commits", span((line["ratios"]["publish"] for line in results), 2)],
        ["fetch and verify", span((line["ratios"]["fetch"] for line in results), 2)],
    ]
    return table(("operation", "ratio"), rows)


FIGURES = (
    Figure("store", "publishing and fetching a large file", ("python -m tests.benchmarks store",), 1, store, runs=3),
    Figure("index", "queries of a store of 10,000 artifacts", ("python -m tests.benchmarks index",), 10, index),
    Figure("pages", "pages over 10,000 artifacts and 300 nights", ("python -m tests.benchmarks ui",), 8, pages),
    Figure("cached", "a cached run over a distant store", ("python -m tests.benchmarks cached",), 6, cached),
    Figure("hub", "a store on the Hub beside the plain client", ("python -m tests.benchmarks hub",), 2, hub, runs=4),
)
