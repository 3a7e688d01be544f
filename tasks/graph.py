"""What compositions are written with: steps, inputs, and the one way to add a stage. Imports no Prefect.

The same composition runs as a flow (:class:`alignment.tasks.stage.Run`) and is only planned
(:class:`alignment_core.checks.plan.Plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from alignment_core.artifacts import Reference
from alignment_core.checks.plan import NotMade
from alignment_core.errors import AlignmentError
from alignment_core.execution.base import StageConfig, StageResult


class BranchFailed(AlignmentError):
    """A stage of a branch failed, or one that it needs did; the other branches continue. ``cause`` is that failure."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Step(Protocol):
    """A stage of a composition. Give it to other stages as an input, where it stands for one of its outputs."""

    @property
    def label(self) -> str:
        """What people call it."""

    def result(self) -> StageResult:
        """What came of it; waits for the stage. Raises its error, or that of another stage that fails meanwhile; BranchFailed
        if it may fail and did."""

    def output(self, name: str) -> Step:
        """The same stage, standing for the output of this name instead of the default one."""

    def artifact(self) -> Reference:
        """The output that it stands for; waits for the stage. Raises NotMade where that is only planned."""


Input = Step | Reference


def artifact(value: Input) -> Reference | None:
    """The artifact behind an input; waits for its stage. None where that is only planned and not in the store."""
    try:
        return value if isinstance(value, Reference) else value.artifact()
    except NotMade:
        return None


def metrics(step: Step) -> dict[str, Any] | None:
    """What a stage measured; waits for it. None where it is only planned and not in the store."""
    try:
        return step.result().metrics
    except NotMade:
        return None


def failure(steps: Iterable[Step]) -> BranchFailed | None:
    """The first failure of these stages, which may fail; waits for them. None also where they are only planned."""
    for step in steps:
        try:
            step.result()
        except BranchFailed as error:
            return error
        except NotMade:
            continue
    return None


CURRENT: ContextVar[Any] = ContextVar("composition")
"""What is being composed: it has a ``store`` and the recipe's ``seed``, and ``submit`` takes stages."""


def submit(
    stage: str,
    label: str,
    config: StageConfig,
    inputs: Mapping[str, Input | None],
    stream: str = "",
    needs: tuple[str, ...] = (),
    after: Step | None = None,
) -> Any:
    """Add the stage of the name ``stage`` to the current composition; inputs that are None are left out.

    Stages of one kind share their random numbers unless their ``stream`` differs: name one where they must not, as for the
    rounds of a loop. ``needs`` are outputs that the composition goes on with although retention may drop them: where they
    were dropped, the stage runs again. The stage begins when ``after`` is done, although it needs nothing of it.
    """
    return CURRENT.get().submit(stage, label, config, inputs, stream, needs, after)


def is_part(label: str, of: str) -> bool:
    """Whether a stage is the one called ``of``, or one of several that ``of`` stands for, as ``round-1`` does."""
    return label == of or label.startswith(f"{of}/")


def training_data() -> dict[str, Step]:
    """Data sets that something in the current composition trains on, by label, kept with the composition."""
    found: dict[str, Step] = vars(CURRENT.get()).setdefault("training_data", {})
    return found
