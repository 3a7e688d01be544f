"""The plan of a composition: which of its stages are in the store already and which would run. Nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.reference import PRUNABLE
from alignment_core.artifacts.snapshot import StoreSnapshot
from alignment_core.composition.graph import NotMade, StageSpec, Step, artifact
from alignment_core.errors import UserError
from alignment_core.execution.base import StageCall, StageConfig, StageResult, load_stage
from alignment_core.execution.key import key_of
from alignment_core.execution.runner import cached_result

State = Literal["cached", "runs", "depends"]


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan. Its state is ``depends`` if an input has yet to be made, so that its key is unknown."""

    label: str
    stage: str
    config: StageConfig
    inputs: Mapping[str, PlannedStage | Reference]
    state: State
    cached: StageResult | None = None
    """Its result in the store, if the state is ``cached``."""
    name: str | None = None
    """The output that it stands for. Default: the default output."""
    needs: tuple[str, ...] = ()
    """Outputs that have to be in the store although retention may delete them."""

    @property
    def reference(self) -> Reference | None:
        """The output that it stands for, if it is in the store."""
        return self.cached.output(self.name) if self.cached else None

    def output(self, name: str) -> PlannedStage:
        """The same stage, standing for another of its outputs. Raises UserError for one that cannot be relied on."""
        stage = load_stage(self.stage)
        default, *_ = stage.outputs
        try:
            kind = stage.kind_of(name)
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        if kind in PRUNABLE and name not in (default, *self.needs):
            raise UserError(
                f"{self.label}: retention may delete the output {name!r}; submit the stage with needs=({name!r},)"
            )
        return replace(self, name=name)

    def artifact(self) -> Reference:
        """The output that it stands for. Raises NotMade if it is not in the store."""
        return self.result().output(self.name)

    def result(self) -> StageResult:
        """Its result in the store. Raises NotMade if there is none."""
        if self.cached is None:
            raise NotMade(f"{self.label} is only planned and has no result")
        return self.cached

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
    """A :class:`~alignment_core.composition.graph.Composition` whose stages are looked up in the store and never run."""

    store: Store
    seed: int
    stages: list[PlannedStage] = field(default_factory=list)
    training_data: dict[str, Step] = field(default_factory=dict)
    """Data sets that a stage trains on, by label."""
    accept: tuple[str, ...] = ()
    """Packages of other versions whose results are reused."""
    not_promoted: str | None = None
    """Why the run's policy would not be promoted, whatever the gates decide; known once the policy is in the store."""
    warnings: list[str] = field(default_factory=list)
    """Sentences to show before the run starts; checks add them."""
    trust_remote_code: bool = False
    """Whether code that models bring may run, in all stages: the recipe's ``model.trust_remote_code``."""
    passed: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Options that are passed through to packages: the recipe's ``resources.passed``."""
    variables: tuple[tuple[str, str], ...] = ()
    """Fields of the recipe that name environment variables, and these."""

    def __post_init__(self) -> None:
        self._snapshot = StoreSnapshot(self.store, uses=False)

    def submit(self, spec: StageSpec) -> PlannedStage:
        """Add a stage to the plan. Raises UserError for a configuration that cannot work."""
        spec.config.check()
        inputs = cast(Mapping[str, PlannedStage | Reference], spec.inputs)
        artifacts = {role: artifact(value) for role, value in inputs.items()}
        known = {role: reference for role, reference in artifacts.items() if reference is not None}
        cached: StageResult | None = None
        state: State = "depends"
        if len(known) == len(inputs):
            call = StageCall(
                stage=spec.stage,
                label=spec.label,
                config=spec.config.model_dump(mode="json"),
                inputs=known,
                seed=self.seed if spec.seed is None else spec.seed,
                stream=spec.stream,
                needs=spec.needs,
                accept=self.accept,
                trust_remote_code=self.trust_remote_code,
                passed=dict(self.passed),
            )
            cached = cached_result(self._snapshot(), call, key_of(call), use=False)
            state = "runs" if cached is None else "cached"
        planned = PlannedStage(spec.label, spec.stage, spec.config, inputs, state, cached, needs=spec.needs)
        self.stages.append(planned)
        return planned
