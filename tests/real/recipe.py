"""The shipped recipe real-model with the rows and the model of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deployments" / "recipes" / "real-model.yaml"
PREFERENCES = "preferences"
"""The branch that needs rows."""
NEEDED = ("hh-rlhf-harmless", "gsm8k")
BENCH = "bench-prompts"
FILES = {"Anthropic/hh-rlhf": "hh-rlhf-harmless", "openai/gsm8k": "gsm8k"}
"""Folders of the data sets of the Hub that the recipe names."""


def recipe_for(model: Path, data: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The recipe with ``model`` and the rows of the folder ``data``, of which parts are written to ``folder``; and a sentence
    for each part of it that is left out."""
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    recipe["model"] = str(model)
    missing = [name for name in NEEDED if not (data / name).is_dir()]
    if missing:
        del recipe["branches"][PREFERENCES]
        return recipe, [f"{PREFERENCES} is left out: there is no {' or '.join(missing)} in {data}"]
    folder.mkdir(parents=True, exist_ok=True)
    recipe["branches"] = with_files(recipe["branches"], data, folder)
    if not (data / BENCH).is_dir():
        return recipe, [f"{PREFERENCES} is evaluated on prompts of HH: there is no {BENCH} in {data}"]
    recipe["branches"][PREFERENCES]["evaluation"]["prompts"] = {"path": str(_bench_prompts(data / BENCH, folder))}
    return recipe, []


def tag_of(seed: int) -> str:
    """The tag of a seed's policy: gates compare it with the model, not with the policy of another seed."""
    return f"policy/real-model-{seed}"


def branches() -> list[str]:
    """Names of the recipe's branches."""
    return list(yaml.safe_load(RECIPE.read_text())["branches"])


def with_files(value: Any, data: Path, folder: Path) -> Any:
    """A part of the recipe in which files stand for data sets of the Hub."""
    if isinstance(value, list):
        return [with_files(item, data, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("path") in FILES:
        source = {name: item for name, item in value.items() if name not in ("split", "subset")}
        return source | {"path": str(_part(data / FILES[value["path"]], value.get("split", "train"), folder))}
    return {name: with_files(item, data, folder) for name, item in value.items()}


def _part(data_set: Path, split: str, folder: Path) -> Path:
    """A file of the rows of a split such as ``train[:900]``."""
    name, _, places = split.rstrip("]").partition("[")
    lines = (data_set / f"{name}.jsonl").read_text().splitlines(keepends=True)
    if places:
        begin, end = (int(place) if place else None for place in places.split(":"))
        lines = lines[begin:end]
    path = folder / f"{data_set.name}-{name}{places.replace(':', '-')}.jsonl"
    path.write_text("".join(lines))
    return path


def _bench_prompts(questions: Path, folder: Path) -> Path:
    """The first turns of MT-Bench and Vicuna."""
    path = folder / "bench.jsonl"
    rows = [json.loads(line) for file in sorted(questions.glob("*.jsonl")) for line in file.read_text().splitlines()]
    path.write_text("".join(json.dumps({"prompt": row["turns"][0]}) + "\n" for row in rows))
    return path
