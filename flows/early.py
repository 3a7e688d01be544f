"""What comes before a run: the checks of its recipe, and its host, if one is certain to be needed. Imports no Prefect."""

from __future__ import annotations

import os
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from alignment_core.artifacts import Store, align_home
from alignment_core.host.client import Host
from alignment_core.journal import RunRecord
from alignment_core.recipes import BaseRecipe, NightlyRecipe
from alignment_core.stages.base import StageCall
from alignment_core.stages.base_model import in_store, pin_model
from alignment_core.stages.runner import cached_result


@dataclass(frozen=True)
class CommandLine:
    """What the ``align`` command brings to the run in its own process; a deployment has none."""

    display: Any
    host: Host | None
    resumes: RunRecord | None = None
    """The run that is taken up again; its stages that were run again on purpose are so still."""
    overrides: tuple[str, ...] = ()
    """What was given with ``--set``; it is in the recipe already."""


COMMAND_LINE: ContextVar[CommandLine | None] = ContextVar("command line", default=None)


def check_recipe(recipe: BaseRecipe, store: Store) -> None:
    """Look at the rows, functions and shapes of all that would run. Raises UserError with a sentence for each mistake."""
    from alignment_core.checks import check
    from flows.planning import plan

    check(plan(recipe, store), recipe.resources).refuse()


def early_host(recipe: BaseRecipe, store: Store) -> Host | None:
    """A host that is starting, if the recipe's first stage has to run; none if it is cached or not to be foreseen.

    Raises UserError if the recipe's model is none.
    """
    if isinstance(recipe, NightlyRecipe) or in_store(store, recipe.model) is not None:
        return None  # a night may be empty
    config = pin_model(recipe.model).model_dump(mode="json")
    call = StageCall(stage="base_model", label="model", config=config, inputs={}, seed=recipe.seed)
    if cached_result(store, call) is not None:
        return None
    log = align_home() / "logs" / f"starting-{os.getpid()}.log"
    host = Host(store.uri, recipe.resources, log, recipe=recipe.name, samples=recipe.samples)
    host.start()
    return host


def closing(host: Host | None) -> Any:
    """A context that ends the host, if there is one."""
    return host if host is not None else nullcontext()
