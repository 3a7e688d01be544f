"""Provenance and bill of materials: what they say, that other tools take them, and where they lie."""

from __future__ import annotations

import json
import time
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement

from alignment_core.artifacts import ProvenanceDraft, Reference, Store
from alignment_core.artifacts.attachments import attachments
from alignment_core.attestation.attest import BOM, PROVENANCE, attest, attestations
from alignment_core.data.addresses import RemoteFile
from alignment_core.data.pin import PinnedSource
from alignment_core.recipes import DataConfig, DataSource
from alignment_core.stages.dataset import DatasetConfig
from tests.attestation.conftest import COMMIT, DATA_COMMIT, Publish


def told(store: Store, reference: Reference, name: str) -> Any:
    return json.loads(attestations(store, reference)[name])


def test_the_statement_is_about_the_artifact_and_each_of_its_files(store, made):
    statement = told(store, made["sft"], PROVENANCE)
    files = {entry.path: entry.sha256 for entry in store.manifest(made["sft"]).files}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {one["name"]: one["digest"]["sha256"] for one in statement["subject"]} == {
        str(made["sft"]): made["sft"].digest,
        **files,
    }


def test_the_statement_has_the_stage_its_direct_and_indirect_inputs_and_external_sources(store, made):
    predicate = told(store, made["sft"], PROVENANCE)["predicate"]
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    assert definition["externalParameters"] == {
        "stage": "sft",
        "label": "sft",
        "config": {"learning_rate": 1e-5},
        "seed": 7,
        "inputs": {"model": str(made["base"]), "train": str(made["data"])},
    }
    found = {one["name"]: one for one in definition["resolvedDependencies"]}
    assert found["model"]["digest"] == {"sha256": made["base"].digest}
    assert found["train"]["annotations"]["stage"] == "dataset"
    assert found["org/base"] == {
        "name": "org/base",
        "uri": f"hf://org/base@{COMMIT}",
        "digest": {"gitCommit": COMMIT},
    }
    assert found["org/rows"]["uri"] == f"hf://datasets/org/rows@{DATA_COMMIT}"
    assert found["/d/rows.jsonl"]["digest"] == {"sha256": "5" * 64}
    assert found["torch"]["uri"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert details["metadata"] == {
        "invocationId": "run-1",
        "startedOn": "2026-01-01T00:00:00Z",
        "finishedOn": "2026-01-01T00:01:02Z",
    }
    assert details["alignment_hardware"] == {"cpus": 2}
    assert details["alignment_metrics"] == {"loss": 0.5}


def test_the_in_toto_library_validates_the_statement(store, made):
    content = told(store, made["sft"], PROVENANCE)
    read = Statement([], "", {})
    json_format.ParseDict(content, read.pb)
    read.validate()
    for dependency in content["predicate"]["buildDefinition"]["resolvedDependencies"]:
        one = ResourceDescriptor()
        json_format.ParseDict(dependency, one.pb)
        one.validate()


def test_the_bill_of_materials_fits_the_schema_and_has_model_data_base_and_packages(store, made):
    text = attestations(store, made["sft"])[BOM].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    model = bom["metadata"]["component"]
    assert (model["type"], model["bom-ref"]) == ("machine-learning-model", str(made["sft"]))
    assert model["modelCard"] == {
        "modelParameters": {
            "architectureFamily": "llama",
            "modelArchitecture": "LlamaForCausalLM",
            "datasets": [{"ref": str(made["data"])}],
        },
        "quantitativeAnalysis": {
            "performanceMetrics": [
                {
                    "type": "accuracy",
                    "value": "0.5",
                    "confidenceInterval": {"lowerBound": "0.25", "upperBound": "0.75"},
                }
            ]
        },
        "properties": [{"name": "alignment:parameters", "value": "1000"}],
    }
    types = {one["bom-ref"]: one["type"] for one in bom["components"]}
    assert types == {
        str(made["base"]): "machine-learning-model",
        str(made["data"]): "data",
        f"pkg:huggingface/org/base@{COMMIT}": "machine-learning-model",
        f"hf://datasets/org/rows@{DATA_COMMIT}": "data",
        "pkg:pypi/torch@2.13.0%2Bcpu": "library",
        "pkg:pypi/transformers@5.19.0": "library",
    }
    needs = {one["ref"]: set(one.get("dependsOn", ())) for one in bom["dependencies"]}
    assert needs.keys() == types.keys() | {str(made["sft"])}
    assert {str(made["base"]), str(made["data"])} < needs[str(made["sft"])]
    assert f"pkg:huggingface/org/base@{COMMIT}" in needs[str(made["base"])]
    assert all(needed <= needs.keys() for needed in needs.values())


def test_a_data_set_and_an_import_have_bills_that_fit_the_schema(store, made, publish: Publish):
    imported = publish("import", "model")
    for reference in (made["data"], imported):
        found = attestations(store, reference)
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(found[BOM].decode()) is None
        assert (PROVENANCE in found) is (reference == made["data"]), "nobody knows how an import was made"


def test_attestations_do_not_depend_on_the_time(store, made, monkeypatch):
    before = attestations(store, made["sft"])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert attest(store, made["sft"]) == before == attachments(store, made["sft"])


def test_provenance_is_of_the_latest_stage_that_made_the_same_bytes(store, made):
    folder = store.fetch(made["sft"])
    later = store.records.makers(made["sft"])[0].model_copy(
        update={"key": "e" * 64, "label": "again", "finished_at": "2026-02-01T00:00:00+00:00"}
    )
    draft = ProvenanceDraft(**{name: getattr(later, name) for name in ProvenanceDraft.model_fields})
    assert store.publish(folder, "model", draft) == made["sft"]
    told_by = told(store, made["sft"], PROVENANCE)["predicate"]["buildDefinition"]["externalParameters"]
    assert told_by["label"] == "again"


def test_files_at_addresses_are_listed_with_their_versions(store, publish: Publish):
    files = {
        "s3://bucket/rows.jsonl": '"etag"',
        "https://host/rows.jsonl": f"sha256:{'6' * 64}",
        f"hf://datasets/org/rows@{DATA_COMMIT}/rows.jsonl": "blob",
    }
    sources = tuple(
        PinnedSource(source=DataSource(path=path), remote=(RemoteFile(address=path, version=version),))
        for path, version in files.items()
    )
    data = DataConfig(sources=tuple(one.source for one in sources), max_length=64)
    config = DatasetConfig(data=data, sources=sources, kind="demonstrations").model_dump(mode="json")
    made = publish("dataset", "dataset", {}, config=config)
    found = told(store, made, PROVENANCE)["predicate"]["buildDefinition"]["resolvedDependencies"]
    s3, web, hub = ({"name": path, "uri": path} for path in files)
    assert [one for one in found if "://" in one["name"]] == [
        {**s3, "annotations": {"version": '"etag"'}},
        {**web, "digest": {"sha256": "6" * 64}},
        {**hub, "digest": {"gitCommit": DATA_COMMIT}, "annotations": {"version": "blob"}},
    ]
    for dependency in found:
        one = ResourceDescriptor()
        json_format.ParseDict(dependency, one.pb)
        one.validate()
    text = attestations(store, made)[BOM].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    parts = {one["name"]: one for one in bom["components"] if one["type"] == "file"}
    assert {name: part["version"] for name, part in parts.items()} == files
    assert parts["https://host/rows.jsonl"]["hashes"] == [{"alg": "SHA-256", "content": "6" * 64}]
    used = next(one["dependsOn"] for one in bom["dependencies"] if one["ref"] == str(made))
    assert {part["bom-ref"] for part in parts.values()} <= {*used}
