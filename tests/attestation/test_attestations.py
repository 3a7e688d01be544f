"""Provenance and bill of materials: their content, validation by other tools, and where they are stored."""

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


def statement_of(store: Store, reference: Reference, name: str) -> Any:
    return json.loads(attestations(store, reference)[name])


def test_the_statement_is_about_the_artifact_and_each_of_its_files(store, references):
    statement = statement_of(store, references["sft"], PROVENANCE)
    files = {entry.path: entry.sha256 for entry in store.manifest(references["sft"]).files}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]} == {
        str(references["sft"]): references["sft"].digest,
        **files,
    }


def test_the_statement_has_the_stage_its_direct_and_indirect_inputs_and_external_sources(store, references):
    predicate = statement_of(store, references["sft"], PROVENANCE)["predicate"]
    definition, details = predicate["buildDefinition"], predicate["runDetails"]
    assert definition["externalParameters"] == {
        "stage": "sft",
        "label": "sft",
        "config": {"learning_rate": 1e-5},
        "seed": 7,
        "inputs": {"model": str(references["base"]), "train": str(references["data"])},
    }
    dependencies = {dependency["name"]: dependency for dependency in definition["resolvedDependencies"]}
    assert dependencies["model"]["digest"] == {"sha256": references["base"].digest}
    assert dependencies["train"]["annotations"]["stage"] == "dataset"
    assert dependencies["org/base"] == {
        "name": "org/base",
        "uri": f"hf://org/base@{COMMIT}",
        "digest": {"gitCommit": COMMIT},
    }
    assert dependencies["org/rows"]["uri"] == f"hf://datasets/org/rows@{DATA_COMMIT}"
    assert dependencies["/d/rows.jsonl"]["digest"] == {"sha256": "5" * 64}
    assert dependencies["torch"]["uri"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert details["metadata"] == {
        "invocationId": "run-1",
        "startedOn": "2026-01-01T00:00:00Z",
        "finishedOn": "2026-01-01T00:01:02Z",
    }
    assert details["alignment_hardware"] == {"cpus": 2}
    assert details["alignment_metrics"] == {"loss": 0.5}


def test_the_in_toto_library_validates_the_statement(store, references):
    content = statement_of(store, references["sft"], PROVENANCE)
    read = Statement([], "", {})
    json_format.ParseDict(content, read.pb)
    read.validate()
    for dependency in content["predicate"]["buildDefinition"]["resolvedDependencies"]:
        descriptor = ResourceDescriptor()
        json_format.ParseDict(dependency, descriptor.pb)
        descriptor.validate()


def test_the_bill_of_materials_fits_the_schema_and_has_model_data_base_and_packages(store, references):
    text = attestations(store, references["sft"])[BOM].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    model = bom["metadata"]["component"]
    assert (model["type"], model["bom-ref"]) == ("machine-learning-model", str(references["sft"]))
    assert model["modelCard"] == {
        "modelParameters": {
            "architectureFamily": "llama",
            "modelArchitecture": "LlamaForCausalLM",
            "datasets": [{"ref": str(references["data"])}],
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
    types = {component["bom-ref"]: component["type"] for component in bom["components"]}
    assert types == {
        str(references["base"]): "machine-learning-model",
        str(references["data"]): "data",
        f"pkg:huggingface/org/base@{COMMIT}": "machine-learning-model",
        f"hf://datasets/org/rows@{DATA_COMMIT}": "data",
        "pkg:pypi/torch@2.13.0%2Bcpu": "library",
        "pkg:pypi/transformers@5.19.0": "library",
    }
    needs = {dependency["ref"]: set(dependency.get("dependsOn", ())) for dependency in bom["dependencies"]}
    assert needs.keys() == types.keys() | {str(references["sft"])}
    assert {str(references["base"]), str(references["data"])} < needs[str(references["sft"])]
    assert f"pkg:huggingface/org/base@{COMMIT}" in needs[str(references["base"])]
    assert all(needed <= needs.keys() for needed in needs.values())


def test_a_data_set_and_an_import_have_bills_that_fit_the_schema(store, references, publish: Publish):
    imported = publish("import", "model")
    for reference in (references["data"], imported):
        documents = attestations(store, reference)
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(documents[BOM].decode()) is None
        assert (PROVENANCE in documents) is (reference == references["data"]), "the origin of an import is unknown"


def test_attestations_do_not_depend_on_the_time(store, references, monkeypatch):
    before = attestations(store, references["sft"])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert attest(store, references["sft"]) == before == attachments(store, references["sft"])


def test_provenance_is_of_the_latest_stage_that_made_the_same_bytes(store, references):
    folder = store.fetch(references["sft"])
    later = store.records.makers(references["sft"])[0].model_copy(
        update={"key": "e" * 64, "label": "again", "finished_at": "2026-02-01T00:00:00+00:00"}
    )
    draft = ProvenanceDraft(**{name: getattr(later, name) for name in ProvenanceDraft.model_fields})
    assert store.publish(folder, "model", draft) == references["sft"]
    told_by = statement_of(store, references["sft"], PROVENANCE)["predicate"]["buildDefinition"]["externalParameters"]
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
    data = DataConfig(sources=tuple(source.source for source in sources), max_length=64)
    config = DatasetConfig(data=data, sources=sources, kind="demonstrations").model_dump(mode="json")
    reference = publish("dataset", "dataset", {}, config=config)
    dependencies = statement_of(store, reference, PROVENANCE)["predicate"]["buildDefinition"]["resolvedDependencies"]
    s3, web, hub = ({"name": path, "uri": path} for path in files)
    assert [dependency for dependency in dependencies if "://" in dependency["name"]] == [
        {**s3, "annotations": {"version": '"etag"'}},
        {**web, "digest": {"sha256": "6" * 64}},
        {**hub, "digest": {"gitCommit": DATA_COMMIT}, "annotations": {"version": "blob"}},
    ]
    for dependency in dependencies:
        descriptor = ResourceDescriptor()
        json_format.ParseDict(dependency, descriptor.pb)
        descriptor.validate()
    text = attestations(store, reference)[BOM].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = json.loads(text)
    parts = {component["name"]: component for component in bom["components"] if component["type"] == "file"}
    assert {name: part["version"] for name, part in parts.items()} == files
    assert parts["https://host/rows.jsonl"]["hashes"] == [{"alg": "SHA-256", "content": "6" * 64}]
    used = next(dependency["dependsOn"] for dependency in bom["dependencies"] if dependency["ref"] == str(reference))
    assert {part["bom-ref"] for part in parts.values()} <= {*used}
