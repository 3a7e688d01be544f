"""A pretrained model, which all tests here use as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from alignment_core.cluster.device import cpu_multiplies_bf16
from alignment_core.execution.machines import WarmMachines
from tests.real_model import NAME, RealModelError
from tests.real_model import real_model as made

multiplies_bf16 = pytest.mark.skipif(
    not cpu_multiplies_bf16(),
    reason="this processor has no instructions for bf16: torch is some eighty times slower in it",
)
HUB_NAME = f"HuggingFaceTB/{NAME}"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; a test that cannot have it fails."""
    torch.set_num_threads(1)  # on cores that another worker uses, threads that wait for each other are ten times slower
    try:
        return made()
    except RealModelError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def hub_cache(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process that finds the model by its Hub name in the Hub's cache, without a network."""
    home, commit = tmp_path_factory.mktemp("huggingface"), "0" * 40
    repo = home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    for file in real_model.iterdir():
        (repo / "snapshots" / commit / file.name).symlink_to(file)
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


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
