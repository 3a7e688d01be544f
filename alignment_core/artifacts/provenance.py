"""Provenance: the stage that made an artifact, with its inputs, configuration and cost."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from alignment_core.artifacts.checksummed import Sealed, unseal
from alignment_core.artifacts.paths import stage_path
from alignment_core.artifacts.reference import DIGEST, Reference
from alignment_core.errors import MAKE_IT_AGAIN, Corrupt


class ProvenanceDraft(Sealed):
    """All that a stage knows about its run before its outputs have digests. ``Store.publish_outputs`` adds them."""

    ADDED = ("overrides", "described_by")

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    key: str = Field(pattern=f"^{DIGEST.pattern}$", description="stage key, 64 hex digits: same key, same result")
    stage: str = Field(description="name of the stage, such as train_dpo")
    label: str = Field(description="label of this run of the stage, such as round-1/dpo")
    key_parts: dict[str, Any] = Field(
        default_factory=dict,
        description="what went into the key: stage name and version, config, input references, seed, code digest",
    )
    inputs: dict[str, Reference] = Field(default_factory=dict, description="input artifacts by role")
    accepted: dict[str, dict[str, str]] = Field(
        default_factory=dict,
        description="inputs that the recipe accepted although they were made with other versions of packages: by role, the "
        "packages and those versions",
    )
    config: dict[str, Any] = Field(default_factory=dict, description="the whole configuration of the stage")
    seed: int = Field(default=0, description="seed that every random choice of the stage derives from")
    code_version: str = Field(default="", description="version of the code, such as a commit")
    packages: dict[str, str] = Field(default_factory=dict, description="versions of the packages that mattered")
    hardware: dict[str, Any] = Field(default_factory=dict, description="processors, accelerators and memory used")
    started_at: str = Field(default="", description="start, ISO 8601 in UTC")
    finished_at: str = Field(default="", description="end, ISO 8601 in UTC")
    seconds: float = Field(default=0.0, description="wall-clock seconds that the stage took")
    cost: dict[str, float] = Field(default_factory=dict, description="resources used: seconds, device_seconds, tokens")
    metrics: dict[str, Any] = Field(default_factory=dict, description="final metrics of the stage")
    run_ids: dict[str, str] = Field(
        default_factory=dict, description="ids of this run in other systems, such as prefect or wandb"
    )
    overrides: tuple[str, ...] = Field(
        default=(),
        description="what the run changed in its recipe, as path=value; the recipe has these changes already",
    )


class Provenance(ProvenanceDraft):
    """One run of a stage and its outputs, kept beside the artifacts and never part of their digests."""

    model_config = ConfigDict(extra="ignore")  # a later version may have written more fields

    outputs: dict[str, Reference] = Field(
        min_length=1, description="the artifacts that were made, by name; the first one is the default output"
    )
    described_by: dict[str, Reference] = Field(
        default_factory=dict,
        description="artifacts that say how the stage ran, by role: recipe, environment and user-code",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_one_output(cls, values: Any) -> Any:
        """Records of earlier versions have one output without a name; it is named after its kind."""
        if not isinstance(values, dict) or "output" not in values:
            return values
        other_fields = {name: value for name, value in values.items() if name != "output"}
        return {"outputs": {str(values["output"]).partition("@")[0]: values["output"]}} | other_fields

    @property
    def references(self) -> set[Reference]:
        """Every artifact that the record names."""
        return {*self.outputs.values(), *self.inputs.values(), *self.described_by.values()}

    @property
    def output(self) -> Reference:
        """The default output."""
        return next(iter(self.outputs.values()))

    def names_of(self, reference: Reference) -> list[str]:
        """The outputs that are this artifact: several may have the same bytes."""
        return [name for name, output in self.outputs.items() if output == reference]

    def labels_of(self, reference: Reference) -> list[str]:
        """The label of the stage, with the output's name if it has several: ``rl (best)``."""
        return (
            [f"{self.label} ({name})" for name in self.names_of(reference)] if len(self.outputs) > 1 else [self.label]
        )


def parse_record(uri: str, path: str, data: bytes) -> Provenance:
    """The stage record that the store ``uri`` has at ``path``. Raises Corrupt for anything else."""
    try:
        record = unseal(Provenance, data)
    except ValueError as error:
        raise Corrupt(f"{path} in {uri} is not a stage record: {error}; {MAKE_IT_AGAIN}") from error
    if stage_path(record.key) != path:
        raise Corrupt(f"{path} in {uri} is the record of another stage key, {record.key}; {MAKE_IT_AGAIN}")
    return record
