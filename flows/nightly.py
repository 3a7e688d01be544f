"""A night: rows that arrived since → DPO on production → rounds → evaluation against production → promotion."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State

from alignment.flows.night import compose
from alignment.flows.nightly_news import announce
from alignment.flows.runs import Outcome, flow_run, run_recipe
from alignment_core.artifacts import Reference, open_store
from alignment_core.errors import Stopped
from alignment_core.nights.inbox import NO_FILES
from alignment_core.nights.ledger import AlreadyRuns, Ledger, Night, summary
from alignment_core.recipes.methods.nightly import NightlyRecipe


def one_night(recipe: NightlyRecipe, from_stage: str | None = None, night: str | None = None) -> dict[str, Any] | State:
    """Run a night, or go on with one that was interrupted. Raises what made it fail, once that is recorded.

    ``night`` names the night; default when the run was due.
    """
    ledger, run_id = Ledger(open_store(recipe.store), recipe), str(flow_run().id)
    entry = Night(night=night or _due(), run=run_id)
    outcome: Any = Outcome(status="completed", run_id=run_id, store=ledger.store.uri).model_dump(mode="json")
    with ExitStack() as held:
        with _failure_recorded(recipe, ledger, entry):
            claim = held.enter_context(ledger.claim(entry.night, entry.run))
        entry = claim.night
        nothing_there = any(line.endswith(NO_FILES) for line in entry.inbox)
        get_run_logger().log(logging.WARNING if nothing_there else logging.INFO, "%s", summary(entry))
        for lost in claim.given_up:
            announce(recipe, lost)
        if entry.state == "claimed":
            with _failure_recorded(recipe, ledger, entry):
                composed = partial(compose, production=entry.production, rows=entry.batch, number=claim.number)
                outcome = run_recipe(recipe, composed, from_stage)
                if isinstance(outcome, State):  # cancelled: its rows are left to the next night
                    return outcome
                entry = ledger.record(_ended(entry, outcome))
    announce(recipe, entry)
    return {**outcome, "night": entry.model_dump(mode="json")}


@contextmanager
def _failure_recorded(recipe: NightlyRecipe, ledger: Ledger, night: Night) -> Iterator[None]:
    """A night that was stopped is not one that failed: it goes on, as if it had been killed."""
    try:
        yield
    except (AlreadyRuns, Stopped):
        raise
    except Exception as error:
        failure = night.model_copy(update={"state": "failed", "reasons": (f"{type(error).__name__}: {error}",)})
        announce(recipe, ledger.record(failure))
        raise


def _ended(night: Night, outcome: dict[str, Any]) -> Night:
    """The entry that closes a night."""
    state, reasons = outcome["promotion"]["state"], outcome["promotion"]["reasons"]
    if state == "unchanged":
        state, reasons = "refused", ["the training did not change production"]
    found = {"candidate": Reference.parse(outcome["outputs"]["policy"]), "metrics": outcome["metrics"]["policies"]}
    return night.model_copy(update={"state": state, "reasons": tuple(reasons), **found})


def _due() -> str:
    """When the flow run was due: a retry of it is the same night."""
    due = flow_run().expected_start_time or datetime.now(UTC)
    return due.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
