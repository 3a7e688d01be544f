"""What is quicker about large imports has the same result."""

from __future__ import annotations

import gc
from importlib import metadata

import pytest

from alignment_core.imports import packages_distributions, uncollected


def test_the_distributions_of_packages_are_those_that_python_names() -> None:
    """Later Pythons also name compiled modules."""
    expected = metadata.packages_distributions()
    quicker = packages_distributions()
    assert len(quicker) > 100
    assert {name: sorted(quicker[name]) for name in quicker} == {name: sorted(expected[name]) for name in quicker}


@pytest.mark.parametrize("collects", [True, False])
def test_python_is_as_before_after_imports_one_within_the_other(collects: bool) -> None:
    before, collected = metadata.packages_distributions, gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with uncollected(), uncollected():
            assert metadata.packages_distributions is packages_distributions
            assert not gc.isenabled()
        assert metadata.packages_distributions is before
        assert gc.isenabled() == collects
    finally:
        (gc.enable if collected else gc.disable)()
