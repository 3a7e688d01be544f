"""Small JSON documents with a checksum inside: stage records and tag moves, which have no digest in their names."""

from __future__ import annotations

import json
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from alignment_core.canonical import digest_of
from alignment_core.errors import one_line

SEAL = "checksum"
M = TypeVar("M", bound=BaseModel)


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
