"""Retention at the end of a run: as the recipe sets it, and errors of it do not fail the run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from prefect.logging import disable_run_logger

from alignment.flows.runs import _prune
from alignment_core.artifacts import Store
from alignment_core.recipes import BaseRecipe, parse_recipe

KEY = "a" * 64


def recipe(**retention: float) -> BaseRecipe:
    content = {"method": "sft", "name": "demo", "model": "some/model", "sft": {"data": "rows.jsonl"}}
    return parse_recipe(content | {"retention": retention} if retention else content)


def forgotten_progress(store: Store) -> Path:
    with store.workspace.claim(KEY) as progress:
        (progress / "step-00000001").write_text("weights")
    for path in (*progress.iterdir(), progress):
        os.utime(path, (0, 0))
    return progress


def prune(recipe: BaseRecipe, store: Store) -> None:
    with disable_run_logger():
        journal = SimpleNamespace(record=SimpleNamespace(run_id="this-run"))
        _prune(recipe, SimpleNamespace(store=store, journal=journal))  # type: ignore[arg-type]  # needs no more of a run


def test_by_default_old_progress_is_pruned_and_rollouts_are_kept(store, tmp_path):
    progress = forgotten_progress(store)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "part-0").write_text("completion")
    rollouts = store.publish(tmp_path / "rows", "rollouts")
    for entry in store.backend.list(""):
        os.utime(store.backend.root / entry.path, (0, 0))
    prune(recipe(), store)
    assert not progress.exists()
    assert not store.is_pruned(rollouts)
    prune(recipe(rollouts_days=30), store)
    assert store.is_pruned(rollouts)


def test_a_store_that_cannot_be_pruned_does_not_fail_the_run(store, tmp_path):
    progress = forgotten_progress(store)
    (store.backend.root / "tags" / "policy").mkdir(parents=True)
    (store.backend.root / "tags" / "policy" / "00000001.json").write_text("damaged")
    prune(recipe(rollouts_days=1), store)  # raises Corrupt inside: the tag's artifact is unknown
    assert not progress.exists()
