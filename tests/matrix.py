"""Matrices of parameters, such as methods at ZeRO stages, of which `make test` runs the points that differ in kind."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def matrix(*axes: Iterable[Any], usual: Collection[Any]) -> list[Any]:
    """All points for ``parametrize``: tuples of a value of each axis, or the values of a single axis. Those that are not
    ``usual`` are exhaustive."""
    assert usual, "some points run always"
    points = list(itertools.product(*axes))
    given = [point if len(axes) > 1 else point[0] for point in points]
    assert all(point in given for point in usual), "no such point"
    return [
        pytest.param(*point, marks=() if value in usual else pytest.mark.exhaustive)
        for point, value in zip(points, given, strict=True)
    ]


def cases(every: Iterable[tuple[Any, ...]], usual: Collection[tuple[Any, ...]]) -> list[Any]:
    """Tuples of values for ``parametrize``; those that are not ``usual`` are exhaustive."""
    listed = list(every)
    assert usual, "some cases run always"
    assert all(case in listed for case in usual), "no such case"
    return [pytest.param(*case, marks=() if case in usual else pytest.mark.exhaustive) for case in listed]
