"""Every command of docs/migrating.md runs, with a model and data that are small and at hand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.align import Align
from tests.recipes.test_migrating import COMMANDS, ROOT

TINY = {
    "scratch": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
}
FEW = {
    "steps": 2,
    "rounds": 1,
    "prompts_per_step": 4,
    "prompts_per_round": 8,
    "freezing_steps": 1,
    "max_steps": 2,
    "rows": 64,
    "test_rows": 8,
    "batch_size": 8,
    "num_train_epochs": 1,
    "max_completion_length": 24,
}
"""Upper bounds of fields that cost time."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A single home for all commands, so that they share equal stages."""
    return tmp_path_factory.mktemp("migrating")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, align: Align, home: Path) -> None:
    _, _, recipe, *arguments = shlex.split(command)
    less = list(less_of(yaml.safe_load((ROOT / recipe).read_text())))
    sets = [word for setting in less for word in ("--set", f"{setting[0]}={json.dumps(setting[1])}")]
    outcome = align(home, "run", str(ROOT / recipe), *sets, *arguments)
    assert outcome["status"] == "completed"
    assert outcome["stages"]


def less_of(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of a recipe with other values: less of everything, and nothing from the Hub or of this store."""
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        here = f"{path}.{name}" if path else str(name)
        if (name == "model" and (isinstance(value, str) and "/" in value)) or path == "models":
            yield here, TINY
        elif name in ("promotion", "min_score"):  # so little training passes no gate
            yield here, None
        elif name in ("data", "prompts") and "path" in value.get("sources", [value])[0]:
            yield here, {"task": "reverse", "rows": FEW["rows"]}
        elif name == "training":
            yield from less_of(value, here)
            if path != "rl":  # whose number of steps is another field
                yield f"{here}.max_steps", FEW["max_steps"]
        elif isinstance(value, dict | list):
            yield from less_of(value, here)
        elif name in FEW and value > FEW[name]:
            yield here, FEW[name]
