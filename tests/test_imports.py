"""What is quicker about large imports has the same result."""

from __future__ import annotations

from importlib import metadata

from alignment_core.imports import packages_distributions, uncollected


def test_the_distributions_of_packages_are_those_that_python_names() -> None:
    """Later Pythons also name compiled modules."""
    expected = metadata.packages_distributions()
    found = packages_distributions()
    assert len(found) > 100
    assert {name: sorted(found[name]) for name in found} == {name: sorted(expected[name]) for name in found}


def test_python_is_as_before_after_an_import() -> None:
    before = metadata.packages_distributions
    with uncollected():
        assert metadata.packages_distributions is packages_distributions
    assert metadata.packages_distributions is before
