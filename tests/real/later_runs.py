"""Runs after that of the recipe real-model, which need its policy or its judge: distillation, and nights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.real.recipe import tag_of, with_files

HERE = Path(__file__).parent
NIGHTS = 2
ROWS_OF_A_NIGHT = 60
JUDGE = "preferences/reward-model"

Align = Callable[..., dict[str, Any]]
"""``align`` with arguments; returns the object that it prints."""


def later_runs(
    align: Align, settings: Mapping[str, Any], data: Path, outcome: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """``distillation``: metrics of the policies by name, and ``nights``: entries of their ledger; each only if it can run.

    ``settings`` are the model and the seed, ``outcome`` is that of the recipe.
    """
    done: dict[str, Any] = {}
    if (outcome.get("promotion") or {}).get("state") in ("promoted", "unchanged"):
        recipe = _recipe("distillation", settings)
        recipe["distillation"]["teacher"]["model"] = tag_of(settings["seed"])
        done["distillation"] = align("run", str(_written(recipe, folder)))["metrics"]["policies"]
    judge = next((stage["outputs"] for stage in outcome["stages"] if stage["label"] == JUDGE), None)
    if judge:
        done["nights"] = _nights(align, _recipe("nightly", settings), data, str(next(iter(judge.values()))), folder)
    return done


def _recipe(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = yaml.safe_load((HERE / f"{name}.yaml").read_text())
    recipe["name"] = f"{recipe['name']}-{settings['seed']}"
    return {**recipe, **settings}


def _written(recipe: Mapping[str, Any], folder: Path) -> Path:
    path = folder / f"{recipe['name']}.json"
    path.write_text(json.dumps(recipe))
    return path


def _nights(align: Align, recipe: dict[str, Any], data: Path, judge: str, folder: Path) -> list[dict[str, Any]]:
    """Pairs arrive before each night; nights that have run before find no new ones. No policy and no reward model of
    the recipe has trained on these pairs."""
    inbox = folder / "inbox"
    inbox.mkdir(exist_ok=True)
    recipe["dpo"]["data"]["path"] = str(inbox)
    recipe["promotion"]["tag"] = f"policy/{recipe['name']}"
    recipe["evaluation"]["rewards"] = [{"reward_model": judge}]
    path = _written(with_files(recipe, data, folder), folder)
    pairs = (data / "hh-rlhf-harmless" / "train.jsonl").read_text().splitlines(keepends=True)
    for night in range(NIGHTS):
        first = len(pairs) - (NIGHTS - night) * ROWS_OF_A_NIGHT
        (inbox / f"night-{night + 1}.jsonl").write_text("".join(pairs[first : first + ROWS_OF_A_NIGHT]))
        align("run", str(path))
    (entries,) = align("nights", "list", recipe["name"]).values()
    return list(entries)
