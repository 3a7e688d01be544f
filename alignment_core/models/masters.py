"""fp32 master weights of a policy in bf16: an artifact beside the policy, from which the next training of the line continues.

A policy in bf16 would lose changes below the precision of bf16 whenever a stage continues from it. Its folder therefore names
its master weights in the file ``masters.json``. So policies that are equal in bf16 and differ in their master weights are
different artifacts, and a stage's key depends on the master weights through its policy. Nothing but training reads them.
"""

from __future__ import annotations

import json
from pathlib import Path

from alignment_core.artifacts.manifest import Manifest
from alignment_core.artifacts.reference import MASTERS, POINTER, Reference
from alignment_core.errors import UserError


def name_masters(policy: Path, masters: Path) -> None:
    """Name the master weights in the folder ``masters``, as they will be published, in the folder of their policy."""
    reference = Manifest.of_directory(masters, MASTERS).reference
    (policy / POINTER).write_text(json.dumps({MASTERS: str(reference)}) + "\n")


def masters_of(policy: Path) -> Reference | None:
    """The master weights of the policy in a folder; None if it has none. Raises UserError for a file that names none."""
    file = policy / POINTER
    if not file.is_file():
        return None
    try:
        return Reference.parse(str(json.loads(file.read_text())[MASTERS]))
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{file} names no master weights ({error!r}): make the model again without this file") from None


def why_not_trained(policy: Reference, masters: Reference, problem: str) -> str:
    """The sentence for a policy whose master weights cannot be read, and what helps."""
    return (
        f"{policy.short} was trained in bf16, and its fp32 master weights are not whole in the store ({problem}): copy them "
        f"from a store that has them (`align artifacts copy {masters} --from … --to …`), train it again "
        "(`align run --from-stage`), or set `training.keep_master_weights: false` to start from its weights in bf16"
    )
