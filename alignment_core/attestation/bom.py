"""A bill of materials: CycloneDX 1.6 in JSON, of an artifact and everything that it was made from.

https://cyclonedx.org/docs/1.6/json/. Models are components of the type ``machine-learning-model``, other artifacts of the type
``data``, packages of the type ``library``. Its only times are those of the records, so that equal records give equal bytes.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from alignment_core.artifacts import Manifest, Reference
from alignment_core.attestation.ancestry import Ancestor, Ancestry
from alignment_core.attestation.names import file_at, hub_package_url, hub_uri, package_url, sha256_of, utc
from alignment_core.evaluation.directions import STATED

MODELS = ("model", "reward-model", "process-reward-model", "critic", "adapter")
"""Kinds of artifacts that are models."""
_SERIALS = uuid.UUID("5c0d7f0e-3a43-4f0c-9d0c-0f6a7d7d2b16")
"""Name space of the serial numbers, which follow from the artifact and the time of its record."""
Component = dict[str, Any]


def bill(manifest: Manifest, ancestry: Ancestry, config: dict[str, Any]) -> dict[str, Any]:
    """The bill of an artifact; ``config`` is the content of a model's config.json; empty for other kinds."""
    parts = {
        component["bom-ref"]: component
        for component in (*_artifacts(ancestry), *_hub(ancestry), *_at_addresses(ancestry), *_packages(ancestry))
    }
    record = ancestry.artifact.record
    time = utc(record.finished_at) if record else ""
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_SERIALS, f'{manifest.reference} {time}')}",
        "version": 1,
        "metadata": {
            **({"timestamp": time} if time else {}),
            "component": _subject(manifest, ancestry, config),
        },
        "components": list(parts.values()),
        "dependencies": list(_dependencies(ancestry, set(parts))),
    }


def _subject(manifest: Manifest, ancestry: Ancestry, config: dict[str, Any]) -> Component:
    component = _component(ancestry.artifact)
    if component["type"] == "machine-learning-model":
        component["modelCard"] = _card(ancestry, config)
    component["components"] = [
        {
            "type": "file",
            "bom-ref": f"{manifest.reference}/{entry.path}",
            "name": entry.path,
            "hashes": [{"alg": "SHA-256", "content": entry.sha256}],
        }
        for entry in manifest.files
    ]
    return component


def _component(ancestor: Ancestor) -> Component:
    reference, record = ancestor.reference, ancestor.record
    is_model = reference.kind in MODELS
    properties = {"stage": record.stage, "key": record.key, "code": record.code_version} if record else {}
    return {
        "type": "machine-learning-model" if is_model else "data",
        "bom-ref": str(reference),
        "name": f"{record.label} ({reference.kind})" if record else reference.kind,
        "version": f"sha256:{reference.digest[:12]}",
        "hashes": [{"alg": "SHA-256", "content": reference.digest}],
        **({} if is_model else {"data": [{"type": "dataset" if reference.kind == "dataset" else "other"}]}),
        **({"properties": _properties(properties)} if properties else {}),
    }


def _properties(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": f"alignment:{name}", "value": value} for name, value in sorted(values.items()) if value]


def _card(ancestry: Ancestry, config: dict[str, Any]) -> dict[str, Any]:
    datasets = [
        {"ref": str(ancestor.reference)} for ancestor in ancestry.earlier if ancestor.reference.kind == "dataset"
    ]
    known = {
        "architectureFamily": config.get("model_type"),
        "modelArchitecture": next(iter(config.get("architectures") or ()), None),
        "datasets": datasets,
    }
    card: dict[str, Any] = {"modelParameters": {name: value for name, value in known.items() if value}}
    if metrics := [*_metrics(ancestry.measured)]:
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    if count := _parameters(ancestry):
        card["properties"] = _properties({"parameters": str(count)})
    return card


def _metrics(measured: dict[str, float]) -> Iterator[dict[str, Any]]:
    for name, value, ends in intervals(measured):
        metric: dict[str, Any] = {"type": name, "value": f"{value:g}"}
        if ends:
            metric["confidenceInterval"] = {"lowerBound": f"{ends[0]:g}", "upperBound": f"{ends[1]:g}"}
        yield metric


def intervals(measured: dict[str, float]) -> Iterator[tuple[str, float, tuple[float, float] | None]]:
    """Name, value and interval of each metric of an evaluation."""
    for name, value in measured.items():
        if name != "confidence" and not name.endswith((".low", ".high", ".n", ".stderr", STATED)):
            low, high = measured.get(f"{name}.low"), measured.get(f"{name}.high")
            yield name, value, None if low is None or high is None else (low, high)


def _parameters(ancestry: Ancestry) -> int | None:
    """The number of weights, by the nearest stage that counted them: training does not change it."""
    for ancestor in ancestry.all:
        same = ancestor.reference.kind == ancestry.artifact.reference.kind
        if same and ancestor.record and isinstance(count := ancestor.record.metrics.get("parameters"), int | float):
            return int(count)
    return None


def _artifacts(ancestry: Ancestry) -> Iterator[Component]:
    yield from map(_component, ancestry.earlier)


def _hub(ancestry: Ancestry) -> Iterator[Component]:
    """Models and data sets that were read from the Hub, with their commits."""
    for name, commit in ancestry.on_hub(data=False):
        purl = hub_package_url(name, commit)
        yield {"type": "machine-learning-model", "bom-ref": purl, "name": name, "version": commit, "purl": purl}
    for name, commit in ancestry.on_hub(data=True):
        uri = hub_uri(name, commit, is_data=True)
        data = [{"type": "dataset", "contents": {"url": uri}}]
        yield {"type": "data", "bom-ref": uri, "name": name, "version": commit, "data": data}


def _at_addresses(ancestry: Ancestry) -> Iterator[Component]:
    """Files at addresses, in the versions that were read."""
    for source in (source for ancestor in ancestry.all for source in ancestor.sources):
        if source.version:
            name, digest = file_at(source.path, source.version), sha256_of(source.version)
            hashes = {"hashes": [{"alg": "SHA-256", "content": digest}]} if digest else {}
            yield {"type": "file", "bom-ref": name, "name": source.path, "version": source.version, **hashes}


def _packages(ancestry: Ancestry) -> Iterator[Component]:
    for ancestor in ancestry.all:
        for name, version in sorted(ancestor.record.packages.items()) if ancestor.record else ():
            purl = package_url(name, version)
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _dependencies(ancestry: Ancestry, parts: set[str]) -> Iterator[dict[str, Any]]:
    for ancestor in ancestry.all:
        yield {"ref": str(ancestor.reference), "dependsOn": sorted(set(_direct(ancestor)))}
    named = {str(ancestor.reference) for ancestor in ancestry.all}
    yield from ({"ref": part} for part in sorted(parts - named))


def _direct(ancestor: Ancestor) -> Iterator[str]:
    """The artifacts, sources and packages that the stage of an artifact used."""
    record = ancestor.record
    if record is None:
        return
    used: set[Reference] = set(record.inputs.values()) - {ancestor.reference}
    yield from map(str, used)
    for source in ancestor.sources:
        if source.commit and ancestor.reads_data:
            yield hub_uri(source.path, source.commit, is_data=True)
        elif source.commit:
            yield hub_package_url(source.path, source.commit)
        elif source.version:
            yield file_at(source.path, source.version)
    yield from (package_url(name, version) for name, version in record.packages.items())


def config_of(data: bytes | None) -> dict[str, Any]:
    """The content of a model's config.json; empty if it cannot be read."""
    try:
        config = json.loads(data or b"{}")
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}
