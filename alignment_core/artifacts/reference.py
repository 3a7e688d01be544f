"""References: the small typed names of artifacts that travel between tasks instead of the bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from alignment_core.errors import UserError

KIND = re.compile(r"[a-z][a-z0-9_-]*")
DIGEST = re.compile(r"[0-9a-f]{64}")
MASTERS = "masters"
"""Kind of fp32 master weights of a policy in bf16; see :mod:`alignment_core.models.masters`."""
POINTER = "masters.json"
"""File in a policy's folder that names its master weights."""
BATCH = "preference-batch"
"""Kind of artifact, and stage, of the rows that a night takes."""
PRUNABLE = ("rollouts", "scores", "trajectories", MASTERS)
"""Large kinds that can be made again, and are needed only until the stages that use them are finished."""


@dataclass(frozen=True, order=True, slots=True)
class Reference:
    """Names one artifact by kind and content: ``model@sha256:<64 hex digits>``. Carries no location.

    As a pydantic field it validates from a string and serialises to one. Raises UserError for a malformed kind
    or digest.
    """

    kind: str
    digest: str

    def __post_init__(self) -> None:
        if not KIND.fullmatch(self.kind):
            raise UserError(
                f"{self.kind!r} is not an artifact kind: a kind is a lower-case word such as 'model' or 'dataset'"
            )
        if not DIGEST.fullmatch(self.digest):
            raise UserError(f"{self.digest!r} is not a digest: a digest is 64 lower-case hex digits")

    @classmethod
    def parse(cls, text: str) -> Reference:
        """The reference that ``text`` spells in full. Raises UserError when it is anything else."""
        kind, separator, digest = text.partition("@sha256:")
        if not separator or not KIND.fullmatch(kind) or not DIGEST.fullmatch(digest):
            raise UserError(
                f"{text!r} is not a reference: expected kind@sha256:<64 lower-case hex digits>, "
                "such as model@sha256:1a2b…"
            )
        return cls(kind, digest)

    def __str__(self) -> str:
        return f"{self.kind}@sha256:{self.digest}"

    @property
    def short(self) -> str:
        """For people: the first 12 hex digits. ``Store.resolve`` accepts it."""
        return f"{self.kind}@sha256:{self.digest[:12]}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _parse_field,
            serialization=core_schema.plain_serializer_function_ser_schema(str, return_schema=core_schema.str_schema()),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{KIND.pattern}@sha256:{DIGEST.pattern}$"}


def _parse_field(value: object) -> Reference:
    if isinstance(value, Reference):
        return value
    try:
        return Reference.parse(value if isinstance(value, str) else repr(value))
    except UserError as error:
        raise ValueError(str(error)) from error  # pydantic then names the field
