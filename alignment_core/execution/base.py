"""Stages, calls of stages, and the context that a stage receives while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, computed_field, model_validator

from alignment_core.artifacts import Provenance, Reference
from alignment_core.canonical import derive_seed
from alignment_core.errors import Stopped, UserError
from alignment_core.execution.cost import times
from alignment_core.execution.curve import Curve, Line
from alignment_core.execution.scheduling import FIRST, Ticket
from alignment_core.models.model_ref import Model
from alignment_core.plugins import Group
from alignment_core.recipes import GenerationConfig, ResourcesConfig
from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.rewards import RewardConfig
from alignment_core.recipes.sections.rl import EnvironmentConfig

if TYPE_CHECKING:
    from alignment_core.execution.machines import WarmMachines


@dataclass(frozen=True)
class SamplingPlan:
    """What a stage samples from a policy: completions of the prompts that are its inputs ``prompts`` and ``held_out``."""

    generation: GenerationConfig
    prompts: int | None = None
    """For how many of the prompts; None: all."""
    environment: EnvironmentConfig | None = None
    """What answers the policy between its turns."""


class StageConfig(Config):
    """Configuration of a stage. All of it decides the result, unless ``content`` says otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _without_trust(cls, values: Any) -> Any:
        """Records of earlier versions say here whether remote code is trusted; now the call does."""
        if isinstance(values, Mapping) and "trust_remote_code" not in cls.model_fields:
            return {name: value for name, value in values.items() if name != "trust_remote_code"}
        return values

    def content(self) -> Any:
        """What goes into the stage's key: the configuration without paths or anything else that cannot matter."""
        return self.model_dump(mode="json")

    def code_used(self) -> tuple[str, ...]:
        """Modules of the plug-ins that the configuration names: ``run`` does not import them by name.

        Every module that they can reach by imports, of their own distribution and of ours, is in the key too.
        """
        return ()

    def packages_used(self) -> tuple[str, ...]:
        """Distributions whose versions decide the result as it is configured, beside those of the :class:`Stage`.

        Raises UserError for one that is not installed.
        """
        return ()

    def check(self) -> None:
        """Raise UserError for what cannot work, such as a package that is not there."""
        self.content()
        self.packages_used()

    def sampling(self) -> SamplingPlan | None:
        """What the stage samples, if it does: engines are prewarmed for it, and its lengths are checked before a run starts."""
        return None

    def rewarded(self) -> Mapping[str, RewardConfig]:
        """By what the stage rewards completions, which it samples or has from its input ``rollouts``: rewards by the field of
        the recipe. Those that are functions of the user's are called on a few prompts before a run starts."""
        return {}


C = TypeVar("C", bound=StageConfig)


@dataclass(frozen=True)
class Stage(Generic[C]):
    """A kind of stage. Raise ``version`` when the same inputs should give another result."""

    name: str
    version: int
    outputs: Mapping[str, str]
    """The artifacts that it makes: their kinds by name. The first one is the default output, which it always makes."""
    config: type[C]
    run: Callable[[StageContext, C], dict[str, Any]]
    """Its key holds a digest of every module that it can reach by imports and that may compute.

    Writes files into the folders of ``context.outputs`` and returns metrics. An output whose folder stays empty is not made.

    ``<name>.first`` is what a metric was at the stage's start; ``warnings`` is a list of sentences that people should read.
    """
    shows: Mapping[str, str] = field(default_factory=dict)
    """The key metrics, which stand for the stage on the terminal and in tables: their titles by name, the first ones first."""
    packages: tuple[str, ...] = ()
    """Distributions that compute the result, such as ``torch``. Their versions are in the key."""


class StageCall(BaseModel):
    """One use of a stage: plain data that travels from the flow to the host."""

    model_config = ConfigDict(frozen=True)

    stage: str
    """What :func:`load_stage` takes."""
    label: str
    """What people call it, such as ``round-1/dpo``; not part of the key."""
    config: dict[str, Any]
    inputs: dict[str, Reference]
    """Input artifacts by role."""
    seed: int = 0
    """The recipe's seed."""
    stream: str = ""
    """Which of the recipe's random streams the stage draws from, such as ``round-2``: stages of one kind that name the same
    one share their noise."""
    trust_remote_code: bool = False
    """Whether code that its models bring may run: the recipe's ``model.trust_remote_code``."""
    passed: dict[str, dict[str, Any]] = {}
    """Options that are passed through to packages, by package: the recipe's ``resources.deepspeed`` and ``engine_options``."""
    rerun: str = ""
    """Set when the stage is to run again although its result is known; equal values mean the same second run."""
    needs: tuple[str, ...] = ()
    """Outputs that have to be there beside the default one, of those that retention may drop; not part of the key."""
    accept: tuple[str, ...] = ()
    """Packages of which a known result may have been made with another version; not part of the key."""
    accepted: dict[str, dict[str, str]] = {}
    """By role, what was accepted so of the inputs, see :class:`StageResult`; not part of the key."""

    def definition(self) -> Stage[Any]:
        return load_stage(self.stage)


class StageResult(BaseModel):
    """What came of a call. ``reason`` says why it ran, or that it was cached."""

    model_config = ConfigDict(frozen=True)

    label: str
    stage: str
    key: str
    state: str
    """``run`` or ``cached``."""
    reason: str
    seconds: float
    """Its work, without start-up and waits, as in its ``cost``; 0 if it is cached."""
    outputs: dict[str, Reference]
    """What it made, by name; the first one is the default output."""
    metrics: dict[str, Any]
    cost: dict[str, float] = {}
    """What making it cost, see :mod:`alignment_core.execution.cost`; for a cached one, when it was made."""
    accepted: dict[str, str] = {}
    """Packages of which it was made with another version than is installed, and that version: the call accepts it."""

    @property
    def times(self) -> str:
        """How long it took, in words; see :func:`alignment_core.execution.cost.times`."""
        return times({**self.cost, "seconds": self.seconds})

    @property
    def made_with(self) -> str:
        """Says of which other versions of packages a result is, if it was accepted so."""
        return self.reason if self.accepted else ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reference(self) -> Reference:
        """The default output."""
        return next(iter(self.outputs.values()))

    def output(self, name: str | None = None) -> Reference:
        """An output; without a name the default one. Raises UserError if the stage made none of this name."""
        if name is None:
            return self.reference
        if name not in self.outputs:
            raise UserError(f"{self.label} made no output {name!r}; there are {', '.join(self.outputs)}")
        return self.outputs[name]

    @classmethod
    def of(cls, record: Provenance, label: str, stage: str, state: str, reason: str, seconds: float) -> StageResult:
        """What a record says came of a call."""
        told = {"outputs": record.outputs, "metrics": record.metrics, "cost": record.cost}
        return cls(label=label, stage=stage, key=record.key, state=state, reason=reason, seconds=seconds, **told)

    @property
    def warnings(self) -> list[str]:
        """What the stage wants people to know, in sentences."""
        return list(self.metrics.get("warnings", ()))


STAGES = Group("alignment.stages", "alignment_core.stages", "STAGE", "stage")


def load_stage(name: str) -> Stage[Any]:
    """The stage of this name, of a module of ours or of an installed distribution. Raises UserError."""
    found: Stage[Any] = STAGES.load(name)
    return found


def shows_of(name: str) -> Mapping[str, str]:
    """The key metrics of a stage; none of a stage that is not installed."""
    try:
        return load_stage(name).shows
    except UserError:
        return {}


class Reporter(Protocol):
    """Where progress goes."""

    def __call__(self, done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None: ...


@dataclass
class StageContext:
    """Everything that a stage may touch: its inputs, the folders of its outputs, its seed, and the machines."""

    inputs: dict[str, Path]
    """Verified local folders by role."""
    references: dict[str, Reference]
    outputs: Mapping[str, Path]
    """An empty folder for each output; what is in it at the end becomes the artifact."""
    progress: Path
    """Folder that outlives a crash, private to this stage's key. It is on the file system of the outputs, so that
    these can be made of links to its files."""
    seed: int
    """Derived from the recipe's seed, the kind of stage and its stream; see :func:`alignment_core.execution.key.stage_seed`."""
    resources: ResourcesConfig
    machines: WarmMachines
    reporter: Reporter
    resumed: Callable[[list[Line]], None] = lambda _: None
    """Called with the lines of the curve that a checkpoint held."""
    curve: Curve = field(default_factory=Curve)
    """The metrics that were reported so far, also before a checkpoint from which the stage was resumed."""
    ticket: Ticket = FIRST
    """Give it to the machines when you ask for one."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the run is being stopped: a stage that can save its progress does so, and ends."""
    trust_remote_code: bool = False
    """That of the call; :meth:`model` hands it on."""
    cost: dict[str, float] = field(default_factory=dict)
    """Work done, added up by the stage; :mod:`alignment_core.execution.cost` has the names."""

    @property
    def output(self) -> Path:
        """The folder of the default output."""
        return next(iter(self.outputs.values()))

    def model(self, role: str) -> Model:
        """The input of this role, which is a model. Raises KeyError if there is none."""
        return Model(self.inputs[role], self.references[role], self.trust_remote_code)

    def derive(self, *parts: Any) -> int:
        """A seed for one shard, request or purpose of this stage."""
        return derive_seed(self.seed, *parts)

    def resume_curve(self, saved: bytes, step: float) -> None:
        """Continue the curve that a checkpoint of ``step`` held; trackers get its lines."""
        self.curve = Curve.from_bytes(saved).up_to(step)
        if self.curve.lines:
            self.resumed(self.curve.lines)

    def report(self, done: float, total: float | None = None, unit: str = "", **metrics: float) -> None:
        """Say how far the stage is. Raises Stopped if the run is being stopped."""
        self.curve.add(done, unit, metrics)
        if self.stopping.is_set():
            raise Stopped(f"stopped after {done:g} of {total or 0:g} {unit}")
        self.reporter(done, total, unit, metrics)
