"""Krippendorff's alpha against values of his "Computing Krippendorff's Alpha-Reliability" (2011)."""

from __future__ import annotations

import pytest

from alignment_core.nights.agreement import krippendorff_alpha


def test_alpha_of_two_observers_and_two_categories() -> None:
    """Section A: its coincidences are 10 of (0, 0), 2 of (1, 1) and 4 of each (0, 1) and (1, 0)."""
    assert krippendorff_alpha(zip("0100000000", "1110010010", strict=True)) == pytest.approx(0.095, abs=5e-4)


def test_alpha_of_four_observers_with_missing_values() -> None:
    """Section C: twelve units, of which one has a single value."""
    observers = ("123321412...", "1233224125.3", ".33323422" + "51.", "12332441251.")
    units = [[value for value in unit if value != "."] for unit in zip(*observers, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)


def test_alpha_at_its_ends() -> None:
    assert krippendorff_alpha([("a", "a"), ("b", "b")]) == 1.0
    # Every unit disagrees: observed 1, expected 2/3, by hand.
    assert krippendorff_alpha([("a", "b"), ("a", "b")]) == pytest.approx(-0.5)
    assert krippendorff_alpha([("a", "a"), ("a",), ()]) is None, "of one category"
    assert krippendorff_alpha([]) is None
