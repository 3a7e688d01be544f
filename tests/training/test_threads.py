"""Several threads of a trainer on a CPU give the same bytes every time."""

from __future__ import annotations

from typing import Any

from tests.training.repeated_places import gradients


def test_the_gradient_of_places_that_are_read_several_times_is_added_up_in_one_order(machines: Any) -> None:
    """torch adds up such gradients from several threads at once, in any order, unless it is told not to."""
    with machines(1, threads=2).trainers() as trainers:
        [(threads, results)] = trainers.group.run_on([0], gradients, 20)
    assert threads == 2
    assert len(set(results)) == 1
