"""Running a planned rebuild in another store, with a comparison of each result with that of then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.artifacts.transfer import copy, plan_bytes
from alignment_core.errors import AlignmentError
from alignment_core.execution.description import RECIPE
from alignment_core.host.client import Host
from alignment_core.lineage.rebuild import Rebuild, Step, call_of, resources_of
from alignment_core.recipes import ResourcesConfig

OnProgress = Callable[[str, float, float | None, str], None]
"""Called with a stage's label, the count that is done, that of all, and their unit."""


class Rebuilt(BaseModel):
    """A stage that ran again."""

    model_config = ConfigDict(frozen=True)

    label: str
    stage: str
    state: str
    """``run``, or ``cached`` if an earlier attempt at the rebuild had run it."""
    same_key: bool
    seconds: float
    seconds_then: float
    outputs: dict[str, tuple[Reference, Reference | None]]
    """The artifacts of then and of now, by name."""

    @property
    def differing(self) -> list[str]:
        """Names of the outputs whose bytes differ."""
        return [name for name, (then, now) in self.outputs.items() if then != now]


def rebuild(
    store: Store, target: Store, planned: Rebuild, moved: dict[str, str], log: Path, on_progress: OnProgress
) -> Iterator[Rebuilt]:
    """Run the stages of a plan one after the other; the first one with other results is the last one.

    Stages that an earlier attempt finished in the ``target`` are not run again. Raises what the stages raise.
    """
    for artifact in planned.taken:  # without the records of their stages, which would count as run
        copy(store, target, plan_bytes(store, target, artifact))
    running = [step for step in planned.steps if step.runs]
    used = {reference for step in running for reference in step.record.inputs.values()}
    made: dict[Reference, Reference] = {}
    host: Host | None = None
    with ExitStack() as open_host:
        for number, step in enumerate(running):
            record = step.record
            resources = _resources(store, running[number:])
            if host is None or (_computes(record) and resources != host.resources):
                open_host.close()
                host = open_host.enter_context(Host(target.uri, resources, log))
            host.recipe_files = _recipe_files(store, record)
            host.overrides = record.overrides
            needs = tuple(name for name, output in record.outputs.items() if output in used)
            call = call_of(record, moved, made).model_copy(update={"needs": needs})
            result = host.run(
                call,
                lambda message, label=record.label: on_progress(  # type: ignore[misc]
                    label, message["done"], message["total"], message["unit"]
                ),
            )
            made |= {output: result.outputs[name] for name, output in record.outputs.items() if name in result.outputs}
            done = Rebuilt(
                label=record.label,
                stage=record.stage,
                state=result.state,
                same_key=result.key == record.key,
                seconds=result.seconds,
                seconds_then=record.seconds,
                outputs={name: (then, result.outputs.get(name)) for name, then in record.outputs.items()},
            )
            yield done
            if done.differing:
                return


def _computes(record: Provenance) -> bool:
    """Whether the stage used trainers or engines, whose number and threads change rounding."""
    return "trainers" in record.hardware


def _resources(store: Store, steps: list[Step]) -> ResourcesConfig:
    """Those of the next stage that computes."""
    return resources_of(store, next((step.record for step in steps if _computes(step.record)), steps[0].record))


def _recipe_files(store: Store, record: Provenance) -> dict[str, str]:
    """The recipe's files, so that the new record names the same recipe."""
    try:
        folder = store.fetch(record.described_by[RECIPE])
    except (KeyError, AlignmentError):
        return {}
    return {path.name: path.read_text() for path in folder.iterdir()}
