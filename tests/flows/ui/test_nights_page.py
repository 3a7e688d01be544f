"""The page about nights: what each took, its outcome and why, candidates over time, and rollbacks."""

from __future__ import annotations

from typing import Any

from alignment_core.artifacts import Store
from alignment_core.artifacts.promotion import rollback
from alignment_core.nights.ledger import History, Night
from tests.flows.ui.conftest import Make
from tests.flows.ui.test_pages import HOSTILE


def test_nights_are_shown_with_outcomes_reasons_curves_and_rollbacks(store: Store, make: Make, get: Any) -> None:
    base, first, second = make("base"), make("first"), make("second")
    history = History(store, "owl")
    scored = [{"candidate": {"accuracy": value}} for value in (0.5, 0.75)]
    nights = [
        Night(night="one", state="promoted", rows=7, production=base, candidate=first, metrics=scored[0]),
        Night(night="two", state="refused", rows=9, candidate=second, metrics=scored[1], reasons=(HOSTILE,)),
        Night(night="three", state="empty", rows=2, inbox=("/in: 1 file, 2 rows, 2 new",)),
    ]
    for number, tagged in enumerate((base, first)):
        store.tags.move("policy/production", tagged, base if number else None, "better")
    rollback(store, "policy/production", reason="it was rude")
    for night in nights:
        history.record(night)
    page = get("/nights").text
    assert page.index("three") < page.index("two") < page.index("one"), "the latest first"
    for text in ("3 entries", "2 rows wait for more", "promoted", "refused", "/in: 1 file, 2 rows, 2 new", "polyline"):
        assert text in page
    assert "policy/production went back to" in page
    assert "it was rude" in page
    assert "<script>alert" not in page
    assert f"/artifacts/{second}/promoted" in page


def test_of_many_nights_fifty_are_shown_unless_all_are_asked_for(store: Store, get: Any) -> None:
    history = History(store, "owl")
    for number in range(52):
        history.record(Night(night=f"night-{number}", state="empty"))
    assert get("/nights").text.count('<th scope="row">night-') == 50
    assert get("/nights?all").text.count('<th scope="row">night-') == 52
