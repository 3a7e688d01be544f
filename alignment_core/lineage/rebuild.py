"""Rebuilding an artifact from its records alone: the calls of the stages behind it, and how they differ from those of now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from alignment_core.artifacts import Provenance, Reference, Store
from alignment_core.artifacts.read_sources import read_sources
from alignment_core.artifacts.reference import BATCH
from alignment_core.canonical import digest_of_file
from alignment_core.cluster.device import cpu_model
from alignment_core.composition.graph import is_part
from alignment_core.errors import AlignmentError, NotFound, UserError, one_line
from alignment_core.execution.base import StageCall
from alignment_core.execution.cache_miss import changes, in_words
from alignment_core.execution.description import ENVIRONMENT, ENVIRONMENT_FILE, RECIPE, SETTINGS_FILE, USER_CODE
from alignment_core.execution.environment import environment
from alignment_core.execution.key import check_source, key_of
from alignment_core.lineage.graph import Graph
from alignment_core.recipes import ResourcesConfig
from alignment_core.recipes.sections.resources import GROUPS_OF_RANKS

SOURCES, DATA = "sources", "data"
"""What to begin from, beside the label of a stage: the files that were read, or the data sets that were made of them."""
_OF_DATA = ("dataset", BATCH)
_ROUNDING = (
    *("trainers", "engines", "tensor_parallel_size", *GROUPS_OF_RANKS),
    *("attention", "zero_stage", "offload_optimizer"),
)
_PASSED = {"deepspeed": "deepspeed", "engine_options": "vllm"}
"""Options of packages that are in keys, by the field of ``resources``: the package."""


class Step(BaseModel):
    """A stage behind an artifact."""

    model_config = ConfigDict(frozen=True)

    record: Provenance
    runs: bool
    """Whether it runs again; otherwise its outputs are taken from the store."""
    differs: tuple[str, ...] = ()
    """How its key differs here and now."""
    problems: tuple[str, ...] = ()
    """Why it cannot run here, in sentences."""


class Rebuild(BaseModel):
    """What rebuilding an artifact would run."""

    model_config = ConfigDict(frozen=True)

    reference: Reference
    steps: tuple[Step, ...]
    """Every stage comes after those whose outputs it uses."""
    taken: tuple[Reference, ...]
    """Artifacts that are taken from the store."""
    missing: tuple[str, ...] = ()
    """Artifacts that are needed and not in the store, in sentences."""
    environment: tuple[str, ...] = ()
    """Packages and processors that differ, and are in no key. Some of them change rounding."""

    @property
    def is_same(self) -> bool:
        """Whether every stage would run, with the key that it had."""
        return not self.missing and not self.differing

    @property
    def differing(self) -> list[Step]:
        """The stages that would run with another key, or cannot run."""
        return [step for step in self.steps if step.runs and (step.differs or step.problems)]


def plan(
    store: Store,
    reference: Reference,
    begin: str = SOURCES,
    moved: Mapping[str, str] | None = None,
    reads_sources: bool = True,
    trusted: bool = False,
    records: list[Provenance] | None = None,
) -> Rebuild:
    """Plan a rebuild that begins from ``sources``, from ``data``, or with the stage of a label (or all of a round's).

    ``moved`` are new paths of sources and of the user's files by their old ones, or of folders that contain them. Without
    ``reads_sources``, sources are only looked for; their bytes are not compared. Stages that run code that their models bring
    need ``trusted``. ``records`` are those of :func:`behind`, if they are known. Raises NotFound for an unknown artifact,
    UserError if no stage made it, or none that would run, and EnvironmentFault if this process runs source that has changed.
    """
    store.manifest(reference)
    if records is None:
        with Graph.of(store) as graph:
            records = behind(graph, reference)
    if not records:
        raise UserError(
            f"no stage of {store.uri} made {reference.short}: it was imported, so there is nothing to rebuild"
        )
    chosen = _that_run(records, begin)
    check_source()
    steps = tuple(_step(store, record, record.key in chosen, moved or {}, reads_sources, trusted) for record in records)
    if not any(step.runs and reference in step.record.outputs.values() for step in steps):
        raise UserError(
            f"--from {begin}: the stage that made {reference.short} would not run, so nothing would be rebuilt"
        )
    made = {output for step in steps if step.runs for output in step.record.outputs.values()}
    used = {used for step in steps if step.runs for used in step.record.inputs.values()}
    taken = sorted(used - made)
    return Rebuild(
        reference=reference,
        steps=steps,
        taken=tuple(taken),
        missing=tuple(problem for artifact in taken if (problem := _absence(store, artifact))),
        environment=tuple(dict.fromkeys(_environment(store, [step.record for step in steps if step.runs]))),
    )


def call_of(record: Provenance, moved: Mapping[str, str], inputs: Mapping[Reference, Reference]) -> StageCall:
    """The call that a record is of. ``inputs`` replaces artifacts by those that were made again."""
    parts = record.key_parts
    return StageCall(
        stage=record.stage,
        label=record.label,
        config=_with_new_paths(record.config, moved),
        inputs={role: inputs.get(used, used) for role, used in record.inputs.items()},
        seed=record.seed,
        stream=parts.get("stream", ""),
        trust_remote_code=parts.get("trust_remote_code", False),
        passed=parts.get("passed", {}),
        rerun=parts.get("rerun", ""),
    )


def resources_of(store: Store, record: Provenance) -> ResourcesConfig:
    """The resources with which a stage ran: its recipe's, if that is known, with what it recorded of its hardware."""
    recipe = record.described_by.get(RECIPE)
    settings: dict[str, Any] = {}
    if recipe is not None:
        with suppress(AlignmentError, OSError, ValueError, KeyError):
            settings = _resources_in(store, recipe)
    names = (*_ROUNDING, "max_tokens_per_microbatch", *(() if settings else ("threads",)))
    recorded = {name: record.hardware[name] for name in names if record.hardware.get(name) is not None}
    device = {"device": record.hardware["device"]} if "device" in record.hardware else {}
    known = {name: value for name, value in settings.items() if name in ResourcesConfig.model_fields}
    passed = record.key_parts.get("passed", {})
    options = {name: passed[package] for name, package in _PASSED.items() if package in passed}
    return ResourcesConfig.model_validate({**known, **device, **recorded, **options})


@lru_cache(maxsize=64)
def _resources_in(store: Store, recipe: Reference) -> dict[str, Any]:
    """The resources of a recipe's artifact. Raises AlignmentError, OSError, ValueError or KeyError if they cannot be read."""
    resources: dict[str, Any] = json.loads((store.fetch(recipe) / SETTINGS_FILE).read_bytes())["resources"]
    return resources


def behind(graph: Graph, reference: Reference) -> list[Provenance]:
    """The records behind an artifact, each after those that it needs. Of several makers of one artifact, the latest that does
    not return an input unchanged."""
    return list(_behind(graph, reference))


def _behind(graph: Graph, reference: Reference) -> Iterator[Provenance]:
    begun: set[str] = set()
    waiting: list[tuple[Reference, Provenance | None]] = [(reference, None)]
    while waiting:
        artifact, ready = waiting.pop()
        if ready is not None:
            yield ready
            continue
        makers = [maker for maker in graph.made_by(artifact) if artifact not in maker.inputs.values()]
        if makers and makers[-1].key not in begun:
            begun.add(makers[-1].key)
            waiting.append((artifact, makers[-1]))
            waiting += [(used, None) for used in reversed(list(makers[-1].inputs.values()))]


def _that_run(records: list[Provenance], begin: str) -> set[str]:
    """Keys of the stages that run."""
    stages = [record for record in records if _is_stage(record)]
    if begin == SOURCES:
        return {record.key for record in stages}
    if begin == DATA:
        return {record.key for record in stages if record.stage not in _OF_DATA}
    chosen = {record.key for record in stages if is_part(record.label, begin)}
    if not chosen:
        labels = ", ".join(record.label for record in stages)
        raise UserError(
            f"--from {begin}: no stage behind the artifact has this label; give {SOURCES}, {DATA} or one of {labels}"
        )
    made: set[Reference] = set()
    for record in records:
        if record.key in chosen or (_is_stage(record) and made & set(record.inputs.values())):
            chosen.add(record.key)
            made |= set(record.outputs.values())
    return chosen


def _is_stage(record: Provenance) -> bool:
    """Whether the record has a stage's key; those of a night's rows and of decisions have none."""
    return "config" in record.key_parts


def _step(
    store: Store, record: Provenance, runs: bool, moved: Mapping[str, str], reads_sources: bool, trusted: bool
) -> Step:
    if not runs:
        return Step(record=record, runs=False)
    call = call_of(record, moved, {})
    problems = list(_absent_sources(call.config, reads_sources))
    differs: list[str] = []
    if call.trust_remote_code and not trusted:
        problems.append(f"{record.label} runs code that its model brings: --trust-remote-code allows it")
    try:
        resources_of(store, record)
        key = key_of(call, checked=True)
    except (AlignmentError, ValidationError, OSError) as error:
        kept = record.described_by.get(USER_CODE)
        where = f"; the user's source as it was is in {kept.short} (`align artifacts show`)" if kept else ""
        sentence = one_line(error) if isinstance(error, ValidationError) else str(error)
        problems.append(f"{record.label}: {sentence}{where}")
    else:
        if key.value != record.key:
            differs = in_words(changes(record.key_parts, key.parts), record.label)
    return Step(record=record, runs=True, differs=tuple(differs), problems=tuple(problems))


def _absent_sources(config: Any, reads: bool) -> Iterator[str]:
    """A sentence for each file that is gone, or has other bytes, if they are to be read."""
    for source in read_sources(config):
        path = Path(source.path)
        if not source.sha256 or not path.is_absolute():
            continue
        if not os.access(path, os.R_OK) or not path.is_file():
            yield f"{path} is gone: put it back, or name its new place with --source {path}=NEW"
        elif reads and digest_of_file(path) != source.sha256:
            yield f"{path} has other bytes than those that were read (sha256 {source.sha256[:12]})"


def _absence(store: Store, artifact: Reference) -> str | None:
    try:
        store.manifest(artifact)
    except NotFound:
        return f"{artifact.short} is not in {store.uri}, nor the record of its stage: copy it there with --ancestors"
    return f"the bytes of {artifact.short} were pruned" if store.is_pruned(artifact) else None


def _with_new_paths(value: Any, moved: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for old, new in moved.items():
            rest = value.removeprefix(old)
            if rest != value and (not rest or rest[0] in "/:"):
                return f"{new}{rest}"
        return value
    if isinstance(value, dict):
        return {name: _with_new_paths(inner, moved) for name, inner in value.items()}
    return [_with_new_paths(inner, moved) for inner in value] if isinstance(value, list) else value


def _environment(store: Store, records: list[Provenance]) -> Iterator[str]:
    """The distributions and processors that differ from those of the records, each once."""
    here = environment({})
    for reference in dict.fromkeys(record.described_by.get(ENVIRONMENT) for record in records):
        if reference is None:
            continue
        try:
            then = json.loads((store.fetch(reference) / ENVIRONMENT_FILE).read_bytes())
        except (AlignmentError, OSError, ValueError):
            continue
        for part in ("python", "code", "distributions"):
            yield from changes(then.get(part, {}), here[part], "" if part == "distributions" else part)
    processors = dict.fromkeys(str(record.hardware["cpu"]) for record in records if record.hardware.get("cpu"))
    yield from (f"cpu: {then} → {cpu_model()}" for then in processors if then != cpu_model())
