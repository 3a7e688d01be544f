"""Steps of a composition, their inputs, and the one way to add a stage.

The same composition runs as a flow (:class:`alignment.tasks.stage.Run`) and is only planned
(:class:`alignment_core.composition.plan.Plan`): both are a :class:`Composition`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from alignment_core.artifacts import Reference, Store
from alignment_core.errors import AlignmentError
from alignment_core.execution.base import StageConfig, StageResult


class NotMade(LookupError):
    """The result of a stage was requested that is only planned."""


class BranchFailed(AlignmentError):
    """A stage of a branch failed, or one that it needs did; the other branches continue. ``cause`` is that failure."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Step(Protocol):
    """A stage of a composition. As an input of other stages it stands for one of its outputs."""

    @property
    def label(self) -> str:
        """Its name in tables and logs."""

    def result(self) -> StageResult:
        """Its result; waits for the stage. Raises its error, or that of another stage that fails meanwhile; BranchFailed if it
        may fail and did; NotMade if it is only planned."""

    def output(self, name: str) -> Step:
        """The same stage, standing for the output of this name instead of the default one."""

    def artifact(self) -> Reference:
        """The output that it stands for; waits for the stage. Raises NotMade if that is only planned."""


Input = Step | Reference


@dataclass(frozen=True)
class StageSpec:
    """A stage as a composition submits it."""

    stage: str
    """Name of its module."""
    label: str
    config: StageConfig
    inputs: Mapping[str, Input]
    stream: str = ""
    """Random stream. Stages of one kind share their random numbers unless their streams differ."""
    needs: tuple[str, ...] = ()
    """Outputs that the composition uses although retention may delete them: if they are gone, the stage runs again."""
    after: Step | None = None
    """A stage that has to be done first although this one takes nothing from it."""
    seed: int | None = None
    """Default: the seed of the composition."""
    common_seed: bool = False
    """Whether the default is the seed of the whole composition, also in a branch with a seed of its own."""
    may_fail: bool = False
    """Whether the other stages continue if this one fails."""


class Composition(Protocol):
    """Takes the stages that a composition submits: a run, a plan, or a branch of one of these."""

    @property
    def store(self) -> Store: ...

    @property
    def seed(self) -> int:
        """The recipe's seed."""

    @property
    def training_data(self) -> dict[str, Step]:
        """Data sets that a stage trains on, by label."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that models bring may run, in all stages: the recipe's ``model.trust_remote_code``."""

    def submit(self, spec: StageSpec) -> Step:
        """Add a stage."""


_CURRENT: ContextVar[Composition] = ContextVar("composition")
"""A context variable, because user flows and plug-ins submit without a handle, and Prefect copies the context into tasks."""


def current() -> Composition:
    """The composition that :func:`submit` adds to. Raises LookupError outside one."""
    return _CURRENT.get()


@contextmanager
def composing(composition: Composition) -> Iterator[None]:
    """Make ``composition`` the current one inside the block."""
    token = _CURRENT.set(composition)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def submit(
    stage: str,
    label: str,
    config: StageConfig,
    inputs: Mapping[str, Input | None],
    stream: str = "",
    needs: tuple[str, ...] = (),
    after: Step | None = None,
    common_seed: bool = False,
) -> Step:
    """Add the stage of the name ``stage`` to the current composition; inputs that are None are left out.

    Stages of one kind share their random numbers unless their ``stream`` differs: name one where they must not, as for the
    rounds of a loop. ``needs`` are outputs that the composition uses although retention may delete them: if they are gone,
    the stage runs again. The stage begins when ``after`` is done, although it takes nothing from it. With ``common_seed``,
    branches with seeds of their own have it with the seed of the whole composition, and so share it if its inputs are equal.
    """
    given = {role: value for role, value in inputs.items() if value is not None}
    return current().submit(StageSpec(stage, label, config, given, stream, needs, after, common_seed=common_seed))


def artifact(value: Input) -> Reference | None:
    """The artifact behind an input; waits for its stage. None if that is only planned and not in the store."""
    try:
        return value if isinstance(value, Reference) else value.artifact()
    except NotMade:
        return None


def metrics(step: Step) -> dict[str, Any] | None:
    """Metrics of a stage; waits for it. None if it is only planned and not in the store."""
    try:
        return step.result().metrics
    except NotMade:
        return None


def failure(steps: Iterable[Step]) -> BranchFailed | None:
    """The first failure of these stages, which may fail; waits for them. None also if they are only planned."""
    for step in steps:
        try:
            step.result()
        except BranchFailed as error:
            return error
        except NotMade:
            continue
    return None


def is_part(label: str, of: str) -> bool:
    """Whether a stage is the one called ``of``, or one of several that ``of`` stands for, as ``round-1`` does."""
    return label == of or label.startswith(f"{of}/")
