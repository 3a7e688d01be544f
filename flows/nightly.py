"""A night: rows that arrived since → DPO on production → rounds → evaluation against production → promotion."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import partial
from math import nan
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State

from alignment.flows.nightly_events import announce
from alignment.flows.outcome import Outcome
from alignment.flows.preflight import COMMAND_LINE
from alignment.flows.runs import flow_run, run_recipe
from alignment_core.artifacts import Reference, open_store
from alignment_core.methods.nightly import NightlyRecipe, compose_night
from alignment_core.nights.attempt import attempt
from alignment_core.nights.inbox import NO_FILES
from alignment_core.nights.ledger import GIVEN_UP, Ledger, Night, summary


def one_night(recipe: NightlyRecipe, from_stage: str | None = None, night: str | None = None) -> dict[str, Any] | State:
    """Run a night, or continue one that was interrupted. Raises the error of a failed night, once the ledger has it.

    ``night`` is the name of the night. Default: the time at which the run was due.
    """
    ledger = Ledger(open_store(recipe.store), recipe)
    run_id = str(flow_run().id)
    due = Night(night=night or _due(), run=run_id)
    outcome: Any = Outcome(status="completed", run_id=run_id, store=ledger.store.uri).model_dump(mode="json")
    with attempt(ledger, due, partial(_announce, recipe)) as current:
        entry, notes = current.night, _given_up(ledger)
        nothing_there = any(line.endswith(NO_FILES) for line in entry.inbox)
        get_run_logger().log(logging.WARNING if nothing_there else logging.INFO, "%s", summary(entry))
        for note in notes:
            _warn(note)
        if entry.state == "claimed":
            composed = partial(
                compose_night, production=entry.production, rows=entry.batch, number=current.claim.batches_before
            )
            lost = partial(current.stop, "another attempt owns the run")
            outcome = run_recipe(recipe, composed, from_stage, lost=lost, notes=notes)
            if isinstance(outcome, State):
                current.stop("the run was cancelled")
                return outcome
            current.end(_ended(entry, outcome))
    given_up = [batch.model_dump(mode="json") for batch in current.claim.given_up]
    return {**outcome, "night": current.night.model_dump(mode="json"), "given_up": given_up}


def _announce(recipe: NightlyRecipe, night: Night) -> None:
    if night.state == GIVEN_UP:
        _warn(summary(night))
    announce(recipe, night)


def _warn(sentence: str) -> None:
    """Warn on the console, or in the log if there is no console."""
    caller = COMMAND_LINE.get()
    (caller.display.warn if caller else get_run_logger().warning)(sentence)


def _given_up(ledger: Ledger) -> list[str]:
    """A sentence for each batch of rows that was given up, which no night takes until a user decides."""
    return [f"rows that were given up wait for a decision: {summary(batch)}" for batch in ledger.given_up()]


def _ended(night: Night, outcome: dict[str, Any]) -> Night:
    """The last entry of a night in the ledger."""
    state, reasons = outcome["promotion"]["state"], outcome["promotion"]["reasons"]
    if state == "unchanged":
        state, reasons = "refused", ["the training did not change production"]
    changed = {
        stage["label"]: stage["metrics"]["changed_weights"]
        for stage in outcome["stages"]
        if stage["stage"] == "dpo" and "changed_weights" in stage["metrics"]  # not in results of earlier versions
    }
    results = {
        "candidate": Reference.parse(outcome["outputs"]["policy"]),
        "metrics": {
            label: {name: nan if value is None else value for name, value in metrics.items()}  # JSON has no NaN
            for label, metrics in outcome["metrics"]["policies"].items()
        },
        "changed_weights": changed,
    }
    return night.model_copy(update={"state": state, "reasons": tuple(reasons), **results})


def _due() -> str:
    """The time at which the flow run was due; a retry belongs to the same night."""
    due = flow_run().expected_start_time or datetime.now(UTC)
    return due.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
