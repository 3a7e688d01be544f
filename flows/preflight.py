"""Before a run: the checks of its recipe, and the start of its host if a stage is certain to run. Imports no Prefect."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from alignment_core.artifacts import Store
from alignment_core.cluster.ray_cluster import is_private
from alignment_core.composition.graph import is_part
from alignment_core.composition.plan import Plan
from alignment_core.errors import UserError
from alignment_core.execution.base import load_stage
from alignment_core.home import align_home
from alignment_core.host.client import Host
from alignment_core.journal import RunRecord
from alignment_core.recipes import BaseRecipe, ResourcesConfig
from alignment_core.recipes.methods import method_of


@dataclass(frozen=True)
class CommandLine:
    """The objects that the ``align`` command passes to the run in its process. Runs of deployments have none."""

    display: Any
    host: Host | None
    resumes: RunRecord | None = None
    """The run that is resumed; stages that it ran again on request keep that request's key."""
    overrides: tuple[str, ...] = ()
    """The ``--set`` options, for the run's name; the recipe already contains them."""
    from_stage: str | None = None
    """The stage from which a user's flow runs again; recipes get it as a parameter."""
    outcomes: list[Any] = field(default_factory=list)
    """Outcomes of the runs that completed in this process, as plain data."""
    warnings: tuple[str, ...] = ()
    """Warnings of the checks."""


COMMAND_LINE: ContextVar[CommandLine | None] = ContextVar("command line", default=None)
"""A context variable, because parameters of a flow are validated, stored and shown by Prefect."""


def check_from_stage(chosen: str | None, labels: Sequence[str]) -> None:
    """Raise UserError if no stage has the name ``chosen``, from which a run should run again."""
    if chosen is None or any(is_part(label, chosen) for label in labels):
        return
    groups = [label.rpartition("/")[0] for label in labels if "/" in label]
    near = difflib.get_close_matches(chosen, [*labels, *groups], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? There" if near else "there"
    raise UserError(f"--from-stage {chosen}: this recipe has no such stage; {hint} are {', '.join(labels)}")


def check_recipe(
    recipe: BaseRecipe,
    store: Store,
    from_stage: str | None = None,
    on_parsed: Callable[[Plan], None] = lambda _: None,
) -> Plan:
    """Check rows, functions and shapes of all stages that would run, and return the plan. ``on_parsed`` gets it as soon as no
    row is malformed, while the other checks go on.

    Raises UserError with a sentence for each mistake, and EnvironmentFault if the promotion would fail on this machine.
    """
    from alignment.flows.planning import plan
    from alignment_core.checks.report import check

    if recipe.promotion is not None:
        from alignment_core.attestation.attest import check_ready

        check_ready(recipe.promotion)
    planned = plan(recipe, store)
    check_from_stage(from_stage, [stage.label for stage in planned.stages])
    findings = check(planned, recipe.resources, lambda: on_parsed(planned))
    findings.refuse()
    planned.warnings += findings.warnings
    return planned


def check_and_start(recipe: BaseRecipe, store: Store, from_stage: str | None) -> tuple[Plan, Host | None]:
    """Check a recipe, and start its host: on a CPU as soon as no row is malformed, beside the checks that follow. It ends if
    these fail."""
    host: Host | None = None

    def start(planned: Plan) -> None:
        nonlocal host
        if _on_this_cpu(recipe.resources):
            host = early_host(recipe, planned)

    try:
        planned = check_recipe(recipe, store, from_stage, start)
    except BaseException:
        if host is not None:
            host.abandon()
        raise
    return planned, host or early_host(recipe, planned)


def early_host(recipe: BaseRecipe, planned: Plan) -> Host | None:
    """Start the host if a stage is certain to run; it prewarms the actors that stages may use."""
    if method_of(recipe).run or not any(stage.state == "runs" for stage in planned.stages):
        return None  # a method with a ``run`` of its own may need no stage: a night may be empty
    log = align_home() / "logs" / f"starting-{os.getpid()}.log"
    prewarm = _prewarm(planned, recipe.resources)
    host = Host(planned.store.uri, recipe.resources, log, recipe=recipe.name, prewarm=prewarm)
    host.start()
    return host


def _prewarm(planned: Plan, resources: ResourcesConfig) -> tuple[str, ...]:
    """The groups of actors that stages may use, in the order of their first use: they share the cores while they start.

    On GPUs and clusters trainers start first in any case; there a stage that samples with GPUs of its own does not wait for
    them.
    """
    groups = [] if _on_this_cpu(resources) else ["trainers"]
    for stage in planned.stages:
        if stage.state == "cached":
            continue
        if stage.config.sampling():
            groups.append("engines")
        if "deepspeed" in load_stage(stage.stage).packages:  # it trains
            groups.append("trainers")
    return tuple(dict.fromkeys(groups))


def _on_this_cpu(resources: ResourcesConfig) -> bool:
    """Whether all actors are on this machine's processors."""
    from alignment_core.checks.shapes import on_cpu

    return on_cpu(resources) and is_private()


def closing(host: Host | None) -> Any:
    """A context that closes the host, if there is one."""
    return host if host is not None else nullcontext()
