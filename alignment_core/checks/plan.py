"""The stages of a recipe as its composition asks for them: which are in the store already, which would run. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.reference import PRUNABLE
from alignment_core.artifacts.snapshot import StoreSnapshot
from alignment_core.errors import UserError
from alignment_core.execution.base import StageCall, StageConfig, StageResult, load_stage
from alignment_core.execution.key import key_of
from alignment_core.execution.runner import cached_result

State = Literal["cached", "runs", "depends"]


class NotMade(LookupError):
    """The result of a stage was asked for that is only planned."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage that was not submitted; it ``depends`` where an input has yet to be made, so that nobody knows its key."""

    label: str
    stage: str
    config: StageConfig
    inputs: Mapping[str, PlannedStage | Reference]
    state: State
    found: StageResult | None = None
    """What the store holds of it, if it is cached."""
    name: str | None = None
    """The output that it stands for; None: the default one."""
    needs: tuple[str, ...] = ()
    """Outputs that have to be there although retention may delete them."""

    @property
    def reference(self) -> Reference | None:
        """The output that it stands for, if it is there."""
        return self.found.output(self.name) if self.found else None

    def output(self, name: str) -> PlannedStage:
        """The same stage, standing for another of its outputs. Raises UserError for one that cannot be relied on."""
        default, *_ = outputs = load_stage(self.stage).outputs
        if name not in outputs:
            raise UserError(f"{self.label}: the stage {self.stage} has no output {name!r}; it has {', '.join(outputs)}")
        if outputs[name] in PRUNABLE and name not in (default, *self.needs):
            raise UserError(
                f"{self.label}: retention may delete the output {name!r}; submit the stage with needs=({name!r},)"
            )
        return replace(self, name=name)

    def artifact(self) -> Reference:
        """The output that it stands for. Raises NotMade if it is not there."""
        return self.result().output(self.name)

    def result(self) -> StageResult:
        """What the store holds of it. Raises NotMade if that is nothing."""
        if self.found is None:
            raise NotMade(f"{self.label} is only planned and has no result")
        return self.found

    def waits_for(self) -> list[str]:
        """Labels of the stages that have to run before its key is known."""
        return sorted({label for label in self._waits_for() if label != self.label})

    def _waits_for(self) -> Iterator[str]:
        if self.state == "runs":
            yield self.label
        for value in self.inputs.values():
            if isinstance(value, PlannedStage) and value.state != "cached":
                yield from value._waits_for()


@dataclass
class Plan:
    """A composition that is only written down: ``alignment.tasks.graph.CURRENT`` while it is composed."""

    store: Store
    seed: int
    stages: list[PlannedStage] = field(default_factory=list)
    accept: tuple[str, ...] = ()
    """Packages of other versions whose results are reused."""
    not_promoted: str | None = None
    """Why the run's policy, whatever the gates say, would not be promoted; known once it is in the store."""
    warnings: list[str] = field(default_factory=list)
    """What people should know before the run starts, in sentences; a check adds them."""
    trust_remote_code: bool = False
    """Whether code that models bring may run, in all stages: the recipe's ``model.trust_remote_code``."""
    passed: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Options that are passed through to packages: the recipe's ``resources.passed``."""
    variables: tuple[tuple[str, str], ...] = ()
    """Fields of the recipe that name environment variables, and these."""

    def __post_init__(self) -> None:
        self._lately = StoreSnapshot(self.store, uses=False)

    def submit(
        self,
        stage: str,
        label: str,
        config: StageConfig,
        inputs: Mapping[str, PlannedStage | Reference | None],
        stream: str = "",
        needs: tuple[str, ...] = (),
        after: PlannedStage | None = None,
        seed: int | None = None,
        may_fail: bool = False,
    ) -> PlannedStage:
        """Note a stage. Raises UserError for a config that cannot work."""
        config.check()
        given = {role: value for role, value in inputs.items() if value is not None}
        references = {role: value if isinstance(value, Reference) else value.reference for role, value in given.items()}
        known = {role: reference for role, reference in references.items() if reference is not None}
        found, state = None, "depends"
        if len(known) == len(given):
            settings = config.model_dump(mode="json")
            told = {
                "config": settings,
                "inputs": known,
                "seed": self.seed if seed is None else seed,
                "stream": stream,
                "needs": needs,
            }
            told |= {"trust_remote_code": self.trust_remote_code, "passed": self.passed}
            call = StageCall(stage=stage, label=label, accept=self.accept, **told)
            found = cached_result(self._lately(), call, key_of(call), use=False)
            state = "runs" if found is None else "cached"
        planned = PlannedStage(label, stage, config, given, state, found, needs=needs)  # type: ignore[arg-type]
        self.stages.append(planned)
        return planned
