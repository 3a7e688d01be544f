"""Failures of stages as the flow gets them: the class of an error survives the way through the host."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from alignment_core.errors import AlignmentError, EnvironmentFault, UserError
from alignment_core.host.client import placed
from alignment_core.host.protocol import describe, rebuild


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights.safetensors"),
        RuntimeError("trainers: `do` failed: OSError(28, 'No space left on device')"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["the host", "an actor", "a library"],
)
def test_a_full_disk_is_a_fault_of_the_machine_in_every_process(error: Exception) -> None:
    rebuilt = rebuild(describe(error))
    assert isinstance(rebuilt, EnvironmentFault)
    assert "the disk is full; free space" in str(rebuilt)


def test_our_own_errors_keep_their_type_and_others_their_name() -> None:
    assert isinstance(rebuild(describe(UserError("the recipe"))), UserError)
    rebuilt = rebuild(describe(KeyError("weights")))
    assert type(rebuilt) is AlignmentError
    assert str(rebuilt) == "KeyError: 'weights'"


def test_an_unexpected_error_names_the_stage_and_the_log() -> None:
    unforeseen = rebuild(describe(RuntimeError("engines: `generate` failed: ValueError('head 16')")))
    error = placed(unforeseen, "round-1/generate", Path("run.log"))
    expected = "round-1/generate: RuntimeError: engines: `generate` failed: ValueError('head 16'); the log is run.log"
    assert (type(error), str(error)) == (AlignmentError, expected)


def test_an_expected_error_names_the_stage_once() -> None:
    for message in ("1 of 3 rows is malformed", "sft/data: 1 of 3 rows is malformed"):
        error = placed(UserError(message), "sft/data", Path("run.log"))
        assert (type(error), str(error)) == (UserError, "sft/data: 1 of 3 rows is malformed")
