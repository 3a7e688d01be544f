"""The run that a user's Prefect flow opens to submit stages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from prefect.context import FlowRunContext
from pydantic_core import PydanticSerializationError, to_jsonable_python

from alignment.flows.preflight import COMMAND_LINE
from alignment.flows.runs import OpenRun, open_run
from alignment_core.attestation.attest import check_ready
from alignment_core.credentials import literals
from alignment_core.errors import UserError
from alignment_core.recipes.recipe import BaseRecipe

_opened: set[tuple[str, int]] = set()
"""Id and attempt of the flow runs of this process that have opened their run."""


class Settings(BaseRecipe):
    """The fields of a recipe that a user's flow has: model, evaluation, promotion, store and resources."""

    method: Literal["own"] = "own"
    """A user's flow."""


@contextmanager
def run(settings: Settings, from_stage: str | None = None) -> Iterator[OpenRun]:
    """Open the run of the calling Prefect flow. Stages are submitted inside the block, and done when it ends.

    The run has a journal, a report and can be resumed, like that of a recipe. Call ``finish`` of the yielded run before the
    block ends, to name the results; after the block, its ``outcome`` is set. ``from_stage`` and its dependants run again.
    Raises the first failure of a stage; UserError outside a flow, and for a flow that opens a second run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise UserError(
            "alignment.run: call it inside a function that is a Prefect flow (@flow), and call that function"
        )
    attempt = str(context.flow_run.id), context.flow_run.run_count  # Prefect may retry a flow in the same process
    if attempt in _opened:
        raise UserError(
            "alignment.run: a flow has one run; submit all stages in one block, or call a flow for each run"
        )
    _opened.add(attempt)
    if settings.promotion is not None:
        check_ready(settings.promotion)
    caller = COMMAND_LINE.get()
    chosen = from_stage or (caller.from_stage if caller else None)
    with open_run(settings, chosen, called=_call(context)) as opened:
        yield opened
        if settings.promotion is not None and opened.outputs.policy is None:
            raise UserError(
                "promotion: the flow does not say what to promote; call finish(policy, …) before its block ends"
            )


def _call(context: Any) -> dict[str, Any]:
    """The call of the flow by ``align resume``, for the run's journal.

    Empty if the flow is not a function of a file, or if its parameters hold a secret or are no plain data.
    """
    function = context.flow.fn
    file = inspect.getsourcefile(function)
    try:
        parameters = to_jsonable_python(context.parameters)
    except PydanticSerializationError:
        return {}
    if literals(parameters) or file is None or not os.path.isfile(file) or function.__qualname__ != function.__name__:
        return {}
    return {"flow": f"{os.path.abspath(file)}:{function.__name__}", "parameters": parameters}
