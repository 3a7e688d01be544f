"""The names of runs in the Prefect UI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.context import FlowRunContext

from alignment.flows.cli import resume as cli_resume
from alignment.flows.preflight import COMMAND_LINE, CommandLine
from alignment.flows.recipe_flow import LONGEST_NAME, _run_name
from alignment_core.journal import Journal, new_record
from tests.tracking.watched import recipe_with


def name(*overrides: str, **parameters: Any) -> str:
    """Of a run with these parameters, where ``overrides`` were given to ``align run``."""
    recipe = recipe_with({}, seed=7)
    token = COMMAND_LINE.set(CommandLine(None, None, None, overrides))
    try:
        with FlowRunContext.model_construct(parameters={"recipe": recipe, **parameters}):  # type: ignore[call-arg]
            return _run_name()
    finally:
        COMMAND_LINE.reset(token)


def test_a_run_is_named_by_its_recipe_and_overrides() -> None:
    assert name() == "small, seed 7"
    assert name(overrides=["seed=3", "sft.training.max_steps=4"]) == "small, seed=3, sft.training.max_steps=4"
    assert name("sft.training.max_steps=4") == "small, seed 7, sft.training.max_steps=4"
    assert name(from_stage="sft", night="2026-11-22") == "small, seed 7, night 2026-11-22, from_stage sft"


def test_a_long_name_is_cut() -> None:
    assert len(name(*(f"sft.data.sources.{number}.rows=100" for number in range(20)))) == LONGEST_NAME


def test_a_resumed_run_keeps_the_settings_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_up: list[Any] = []
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    monkeypatch.setattr("alignment.flows.cli.run.run_here", lambda *given: taken_up.append(given))
    content = recipe_with({}).model_dump(mode="json")
    with Journal(new_record("0" * 8, "small", content, "store", overrides=("seed=3",))).open() as journal:
        journal.end("stopped")
    cli_resume.resume("last")
    assert [given[-1] for given in taken_up] == [("seed=3",)]
