"""Provenance: who made an artifact, from what, with which configuration, at what cost."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from alignment_core.artifacts.reference import DIGEST, Reference


class ProvenanceDraft(BaseModel):
    """All that a stage knows about its run before the output has a name. ``Store.publish`` adds the name."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    key: str = Field(pattern=f"^{DIGEST.pattern}$", description="stage key, 64 hex digits: same key, same result")
    stage: str = Field(description="name of the stage, such as train_dpo")
    label: str = Field(description="what people call this run of the stage, such as round-1/dpo")
    key_parts: dict[str, Any] = Field(
        default_factory=dict,
        description="what went into the key: stage name and version, config, input references, seed, code digest",
    )
    inputs: dict[str, Reference] = Field(default_factory=dict, description="input artifacts by role")
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


class Provenance(ProvenanceDraft):
    """Who made an artifact. Lives beside the artifact, never inside its digest."""

    model_config = ConfigDict(extra="ignore")  # a later version may have written more fields

    output: Reference = Field(description="the artifact that was made")
