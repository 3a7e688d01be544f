"""Stages, calls of stages, and the context that a stage receives while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, computed_field, model_validator

from alignment_core.artifacts import Provenance, Reference
from alignment_core.canonical import derive_seed
from alignment_core.errors import MAKE_IT_AGAIN, Corrupt, NotFound, Stopped, UserError
from alignment_core.execution.cost import times
from alignment_core.execution.curve import Curve, Line
from alignment_core.execution.scheduling import FIRST, Ticket
from alignment_core.models.masters import masters_of, why_not_trained
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
    """The completions that a stage samples from a policy, of its inputs ``prompts`` and ``held_out``."""

    generation: GenerationConfig
    prompts: int | None = None
    """Number of prompts. Default: all."""
    environment: EnvironmentConfig | None = None
    """The environment that answers the policy between its turns."""
    dtype: str | None = None
    """Float type in which the policy is trained meanwhile. Default: it is sampled as it is stored."""


class StageConfig(Config):
    """Configuration of a stage. All fields decide the result, except those that ``content`` leaves out."""

    @model_validator(mode="before")
    @classmethod
    def _without_trust(cls, values: Any) -> Any:
        """Records of earlier versions say here whether remote code is trusted; now the call does."""
        if isinstance(values, Mapping) and "trust_remote_code" not in cls.model_fields:
            return {name: value for name, value in values.items() if name != "trust_remote_code"}
        return values

    def content(self) -> Any:
        """The part of the stage's key that the configuration decides: without paths and other fields that cannot matter."""
        return self.model_dump(mode="json")

    def code_used(self) -> tuple[str, ...]:
        """Modules of the plug-ins that the configuration names, because ``run`` does not import them by name.

        The key contains every module that they can reach by imports, of their own distribution and of ours.
        """
        return ()

    def packages_used(self) -> tuple[str, ...]:
        """Distributions whose versions decide the result of this configuration, beside those of the :class:`Stage`.

        Raises UserError for one that is not installed.
        """
        return ()

    def check(self) -> None:
        """Raise UserError for a configuration that cannot work, for example without a package."""
        self.content()
        self.packages_used()

    def sampling(self) -> SamplingPlan | None:
        """The sampling of the stage, if any: engines are prewarmed for it, and its lengths are checked before a run starts."""
        return None

    def rewarded(self) -> Mapping[str, RewardConfig]:
        """Rewards of the completions that the stage samples or gets as ``rollouts``, by the field of the recipe.

        User functions among them are called on a few prompts before a run starts.
        """
        return {}


C = TypeVar("C", bound=StageConfig)


@dataclass(frozen=True)
class Stage(Generic[C]):
    """A kind of stage. Raise ``version`` if the same inputs give another result from now on."""

    name: str
    version: int
    outputs: Mapping[str, str]
    """Its output artifacts: their kinds by name. The first one is the default output, which is always made. A name such as
    ``checkpoint-*`` stands for any number of outputs, which :meth:`StageContext.add_output` adds."""
    config: type[C]
    run: Callable[[StageContext, C], dict[str, Any]]
    """Writes files into the folders of ``context.outputs`` and returns metrics. An output whose folder stays empty is not made.

    The metric ``<name>.first`` is the value of another one at the stage's start; ``warnings`` is a list of sentences to show.
    The key contains a digest of every module that the function can reach by imports and that may compute.
    """
    shows: Mapping[str, str] = field(default_factory=dict)
    """The key metrics on the terminal and in tables: their titles by name, in order."""
    packages: tuple[str, ...] = ()
    """Distributions that compute the result, such as ``torch``. The key contains their versions."""

    def kind_of(self, output: str) -> str:
        """The kind of the output of this name. Raises UserError if the stage has none."""
        for name, kind in self.outputs.items():
            if fnmatchcase(output, name):
                return kind
        raise UserError(f"the stage {self.name} has no output {output!r}; it has {', '.join(self.outputs)}")


class StageCall(BaseModel):
    """One use of a stage: plain data that travels from the flow to the host."""

    model_config = ConfigDict(frozen=True)

    stage: str
    """Its name, for :func:`load_stage`."""
    label: str
    """Its name in the run, such as ``round-1/dpo``; not part of the key."""
    config: dict[str, Any]
    inputs: dict[str, Reference]
    """Input artifacts by role."""
    seed: int = 0
    """The recipe's seed."""
    stream: str = ""
    """Random stream, such as ``round-2``: stages of one kind with the same stream share their noise."""
    trust_remote_code: bool = False
    """Whether code of its models may run: the recipe's ``model.trust_remote_code``."""
    passed: dict[str, dict[str, Any]] = {}
    """Options that are passed through to packages, by package: the recipe's ``resources.deepspeed`` and ``engine_options``."""
    rerun: str = ""
    """Set if the stage has to run again although its result is known; equal values mean the same second run."""
    needs: tuple[str, ...] = ()
    """Outputs beside the default one that have to be in the store although retention may delete them; not part of the key."""
    accept: tuple[str, ...] = ()
    """Packages whose other versions are accepted in a known result; not part of the key."""
    accepted: dict[str, dict[str, str]] = {}
    """Accepted versions of the inputs by role, see :class:`StageResult`; not part of the key."""

    def definition(self) -> Stage[Any]:
        return load_stage(self.stage)


class StageResult(BaseModel):
    """The result of a call. ``reason`` says why it ran, or that it was cached."""

    model_config = ConfigDict(frozen=True)

    label: str
    stage: str
    key: str
    state: str
    """``run`` or ``cached``."""
    reason: str
    seconds: float
    """Seconds of work, without start-up and waits, as in ``cost``; 0 if it is cached."""
    outputs: dict[str, Reference]
    """Its outputs by name; the first one is the default output."""
    metrics: dict[str, Any]
    cost: dict[str, float] = {}
    """Its cost, see :mod:`alignment_core.execution.cost`; of a cached result, the cost when it was computed."""
    accepted: dict[str, str] = {}
    """Packages whose installed version is not the one that computed it, and that version; the call accepts it."""

    @property
    def times(self) -> str:
        """Its times in words; see :func:`alignment_core.execution.cost.times`."""
        return times({**self.cost, "seconds": self.seconds})

    @property
    def made_with(self) -> str:
        """A sentence about the accepted versions of packages; empty if there are none."""
        return self.reason if self.accepted else ""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reference(self) -> Reference:
        """The default output."""
        return next(iter(self.outputs.values()))

    def output(self, name: str | None = None) -> Reference:
        """The output of this name, by default the default output. Raises UserError if the stage did not make it."""
        if name is None:
            return self.reference
        if name not in self.outputs:
            raise UserError(f"{self.label} made no output {name!r}; there are {', '.join(self.outputs)}")
        return self.outputs[name]

    @classmethod
    def of(cls, record: Provenance, label: str, stage: str, state: str, reason: str, seconds: float) -> StageResult:
        """The result of a call, from its record."""
        recorded = {"outputs": record.outputs, "metrics": record.metrics, "cost": record.cost}
        return cls(label=label, stage=stage, key=record.key, state=state, reason=reason, seconds=seconds, **recorded)

    @property
    def warnings(self) -> list[str]:
        """Warnings of the stage, in sentences."""
        return list(self.metrics.get("warnings", ()))


STAGES = Group("alignment.stages", "alignment_core.stages", "STAGE", "stage")


def load_stage(name: str) -> Stage[Any]:
    """The stage of this name, of a module of ours or of an installed distribution. Raises UserError."""
    stage: Stage[Any] = STAGES.load(name)
    return stage


def shows_of(name: str) -> Mapping[str, str]:
    """The key metrics of a stage; none of a stage that is not installed."""
    try:
        return load_stage(name).shows
    except UserError:
        return {}


class Reporter(Protocol):
    """Receives the progress of a stage."""

    def __call__(self, done: float, total: float | None, unit: str, metrics: Mapping[str, float]) -> None: ...


@dataclass
class StageContext:
    """Everything that a stage may use: its inputs, the folders of its outputs, its seed, and the machines."""

    inputs: dict[str, Path]
    """Verified local folders by role."""
    references: dict[str, Reference]
    outputs: dict[str, Path]
    """An empty folder for each output; its content at the end becomes the artifact."""
    progress: Path
    """Folder of this stage's key that survives a crash. It is on the file system of the outputs, so that they can be hard
    links to its files."""
    seed: int
    """Derived from the recipe's seed, the kind of stage and its stream; see :func:`alignment_core.execution.key.stage_seed`."""
    resources: ResourcesConfig
    machines: WarmMachines
    reporter: Reporter
    resumed: Callable[[list[Line]], None] = lambda _: None
    """Called with the lines of the curve in the checkpoint from which the stage resumes."""
    saved: Callable[[str, float], None] = lambda part, seconds: None
    """Called with the seconds that a part of saving progress took, such as ``save``: a run that is stopped needs them again."""
    curve: Curve = field(default_factory=Curve)
    """All metrics reported so far, including those before the checkpoint from which the stage resumed."""
    fetch: Callable[[Reference], Path] | None = None
    """Fetches another artifact, until the stage ends; None where there is no store."""
    ticket: Ticket = FIRST
    """Its place in the queue for machines."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set if the run is being stopped: a stage saves its progress if it can, and ends."""
    trust_remote_code: bool = False
    """Whether code of its models may run, as in the call; :meth:`model` uses it."""
    cost: dict[str, float] = field(default_factory=dict)
    """Work that the stage adds up; :mod:`alignment_core.execution.cost` has the names."""

    @property
    def output(self) -> Path:
        """The folder of the default output."""
        return next(iter(self.outputs.values()))

    def add_output(self, name: str) -> Path:
        """An empty folder for one more output, whose name fits a pattern among the stage's outputs."""
        self.outputs[name] = self.output.with_name(name)
        self.outputs[name].mkdir()
        return self.outputs[name]

    def model(self, role: str) -> Model:
        """The model that is the input of this role. Raises KeyError if there is none."""
        return Model(self.inputs[role], self.references[role], self.trust_remote_code)

    def masters(self, role: str) -> Path | None:
        """The fp32 master weights of the policy that is the input of this role; None if it has none.

        Raises UserError if they were deleted, are damaged, or are in another store.
        """
        reference = masters_of(self.inputs[role])
        if reference is None or self.fetch is None:
            return None
        try:
            return self.fetch(reference)
        except (Corrupt, NotFound) as error:
            problem = str(error).removesuffix(f"; {MAKE_IT_AGAIN}")  # its stage does not run again for them
            raise UserError(why_not_trained(self.references[role], reference, problem)) from error

    def derive(self, *parts: Any) -> int:
        """A seed for one shard, request or purpose of this stage."""
        return derive_seed(self.seed, *parts)

    def resume_curve(self, saved: bytes, step: float) -> None:
        """Continue the curve of a checkpoint at ``step``; trackers get its lines."""
        self.curve = Curve.from_bytes(saved).up_to(step)
        if self.curve.lines:
            self.resumed(self.curve.lines)

    def report(self, done: float, total: float | None = None, unit: str = "", **metrics: float) -> None:
        """Report progress. Raises Stopped if the run is being stopped."""
        self.curve.add(done, unit, metrics)
        if self.stopping.is_set():
            raise Stopped(f"stopped after {done:g} of {total or 0:g} {unit}")
        self.reporter(done, total, unit, metrics)
