"""Small JSON documents with a checksum inside: stage records and tag moves, which have no digest in their names."""

from __future__ import annotations

import json
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, SerializerFunctionWrapHandler, ValidationError, model_serializer

from alignment_core.canonical import digest_of
from alignment_core.errors import one_line

SEAL = "checksum"
M = TypeVar("M", bound=BaseModel)


class Sealed(BaseModel):
    """A model of such documents. Fields that a version added are left out where they are empty, so that documents stay the same
    bytes, and readers of earlier versions know all of them."""

    ADDED: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_empty_additions(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if name not in self.ADDED or value}


def seal(model: BaseModel) -> bytes:
    """The document of a model. Its last field is the digest of all others."""
    fields = json.loads(model.model_dump_json())
    return json.dumps(fields | {SEAL: digest_of(fields)}, indent=2, ensure_ascii=False).encode()


def unseal(kind: type[M], document: bytes) -> M:
    """The model in a document. Raises ValueError for a malformed or changed document; those of early versions have no checksum
    and are accepted without one."""
    try:
        fields = json.loads(document)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    if (checksum := fields.pop(SEAL, None)) is not None and checksum != digest_of(fields):
        raise ValueError("its content does not have the checksum in it")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ValueError(one_line(error)) from error
