"""A pretrained model, which all tests here use as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_model import RealModelError
from tests.real_model import real_model as made


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; a test that cannot have it fails."""
    try:
        return made()
    except RealModelError as error:
        pytest.fail(str(error), pytrace=False)
