"""One parameter, ``family``: each tokenizer with its chat template."""

from __future__ import annotations

import pytest

from alignment_core.data.template import Renderer
from tests.rendering.families import Family
from tests.rendering.installed import FAMILIES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All families, unless a test names its own."""
    named = any("family" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "family" in metafunc.fixturenames and not named:
        metafunc.parametrize("family", FAMILIES, ids=str, scope="session")


@pytest.fixture
def renderer(family: Family) -> Renderer:
    if family.template is None:
        pytest.skip("the package that is installed does not ship the template")
    return Renderer(family.tokenizer, eos_token_ids=family.stop_ids)
