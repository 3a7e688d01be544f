"""A store for a stage's inputs, and a reporter that kills an actor under way."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from alignment_core.artifacts import Reference, Store, open_store
from alignment_core.data.turn_end import keep_chat_template


def store_with(
    folder: Path, model: Path, rows: pa.Table, chat_template: str | None = None
) -> tuple[Store, Reference, Reference]:
    """A store that holds a model and a data set, which may have a chat template of its own."""
    store, data = open_store(folder / "store"), folder / "data"
    data.mkdir(parents=True)
    pq.write_table(rows, data / "train.parquet")
    if chat_template is not None:
        keep_chat_template(chat_template, data)
    return store, store.publish(model, "model"), store.publish(data, "dataset")


class Killer:
    """A reporter that records progress and kills the last actor of a group, once, when ``at`` units are done."""

    def __init__(self, machines: Any, group: str, at: int) -> None:
        self.machines, self.group, self.at = machines, group, at
        self.done: list[float] = []

    def __call__(self, done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None:
        self.done.append(done)
        if done == self.at and self.done.count(done) == 1:
            actors = self.machines.actors
            group = actors.learners.get(self.group) or getattr(actors, self.group)
            os.kill(group.ray.get(group.actors[-1].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
