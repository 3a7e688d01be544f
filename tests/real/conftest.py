"""A pretrained model, which all tests here use as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from alignment_core.execution.machines import WarmMachines
from tests.real_model import RealModelError
from tests.real_model import real_model as made


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; a test that cannot have it fails."""
    torch.set_num_threads(1)  # on cores that another worker uses, threads that wait for each other are ten times slower
    try:
        return made()
    except RealModelError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def real_machines(machines: Any) -> Iterator[WarmMachines]:
    """A warm trainer and a warm engine for it."""
    warm = machines(1, kv_cache_mib=64, zero_stage=None, wait_timeout_seconds=300)
    yield warm
    warm.actors.end_actors()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for models of half a gigabyte, which are deleted at once."""
    with TemporaryDirectory() as folder:
        yield Path(folder)
