"""Drafts of recipes, as `align init` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment.flows.planning import plan
from alignment_core.artifacts import Store
from alignment_core.checks.report import check
from alignment_core.checks.rows import answers_to
from alignment_core.init import recipe
from alignment_core.init.held_out import held_out_file
from alignment_core.init.machine import Machine
from alignment_core.init.recipe import InitRequest, InitResult
from alignment_core.recipes import load_recipe
from tests.init.rows_of_kinds import jsonl

GIB = 1 << 30
CPU, GPU = Machine(0, 16 * GIB), Machine(1, 80 * GIB)
Draft = Callable[..., InitResult]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's process takes seconds to start; tests of the command have it."""
    monkeypatch.setattr("alignment_core.checks.rows.ask", answers_to)
    monkeypatch.setattr("alignment_core.init.lengths.ask", answers_to)


@pytest.fixture
def draft(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> Draft:
    """``draft(data, …)`` writes ``recipe.yaml`` as the command does."""

    def run(data: Path | str, machine: Machine = CPU, **options: Any) -> InitResult:
        output = options.pop("output", tmp_path / "recipe.yaml")
        request = InitRequest(str(data), output, **{"model": "scratch", **options})
        monkeypatch.setattr(recipe, "this_machine", lambda: machine)
        result = recipe.draft(request, store, lambda text: None)
        output.write_text(result.text)
        if result.profile.held_out.rows:
            jsonl(held_out_file(output), result.profile.held_out.rows)
        return result

    return run


def problems(path: Path, store: Store) -> list[str]:
    """The problems that `align check` reports."""
    parsed = load_recipe(path)
    return check(plan(parsed, store), parsed.resources).problems
