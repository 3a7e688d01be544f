"""A pretrained model, which all tests here use as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from alignment_core.execution.machines import WarmMachines
from alignment_core.recipes import ResourcesConfig
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
def real_machines() -> Iterator[WarmMachines]:
    """A warm trainer and a warm engine for it."""
    resources = ResourcesConfig(device="cpu", trainers=1, engines=1, kv_cache_mib=64, wait_timeout_seconds=300)
    with TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # a short path, for Ray's sockets
        machines = WarmMachines(resources, Path(temporary))
        yield machines
        machines.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for models of half a gigabyte, which are deleted at once."""
    with TemporaryDirectory() as folder:
        yield Path(folder)
