"""Machines go to the earliest submitted of the waiting stages, and waits are reported to the stage's clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from alignment_core.execution.scheduling import OrderedLock, Ticket
from tests.processes import wait_until


def test_the_earliest_waiting_stage_goes_first_in_any_order_of_arrival() -> None:
    turnstile, passed, waiting = OrderedLock(), [], []

    def stage(order: int) -> None:
        with turnstile.hold(Ticket(order, lambda on: waiting.append(order) if on else None)):
            passed.append(order)

    threads = [threading.Thread(target=stage, args=(order,)) for order in (5, 3, 9, 1)]
    with turnstile.hold(Ticket(7)):
        for number, thread in enumerate(threads, start=1):
            thread.start()
            assert wait_until(partial(lambda number: len(waiting) == number, number), 10)
    for thread in threads:
        thread.join(10)
    assert waiting == [5, 3, 9, 1]
    assert passed == [1, 3, 5, 9]


def test_a_wait_is_reported_from_start_to_end_and_no_wait_is_not_reported() -> None:
    turnstile, waits = OrderedLock("the trainers"), []
    with turnstile.hold(Ticket(0, waits.append, "sft")):
        assert waits == []
        later = threading.Thread(target=lambda: _pass(turnstile, Ticket(1, waits.append, "dpo")))
        later.start()
        assert wait_until(lambda: len(waits) == 1, 10)
    later.join(10)
    assert waits == ["the trainers, in use by sft", None]


def test_a_wait_names_the_stage_that_holds_the_lock_by_now() -> None:
    turnstile, waits = OrderedLock("the trainers"), []
    with turnstile.hold(Ticket(0, label="sft")):
        last = threading.Thread(target=lambda: _pass(turnstile, Ticket(2, waits.append, "kto")))
        last.start()
        assert wait_until(lambda: len(waits) == 1, 10)
        earlier = threading.Thread(
            target=lambda: _hold_until(turnstile, Ticket(1, label="dpo"), lambda: len(waits) == 2)
        )
        earlier.start()
        assert wait_until(lambda: len(turnstile._waiting) == 2, 10)
    for thread in (earlier, last):
        thread.join(10)
    assert waits == ["the trainers, in use by sft", "the trainers, in use by dpo", None]


def test_giving_way_admits_an_earlier_stage_and_no_later_stage() -> None:
    turnstile, passed, waiting = OrderedLock(), [], []

    def stage(order: int) -> None:
        with turnstile.hold(Ticket(order, lambda on: waiting.append(order) if on else None)):
            passed.append(order)

    threads = [threading.Thread(target=stage, args=(order,)) for order in (1, 9)]
    with turnstile.hold(Ticket(5)) as give_way:
        give_way()
        passed.append(5)
        for thread in threads:
            thread.start()
        assert wait_until(lambda: len(waiting) == 2, 10)
        give_way()
        passed.append(5)
    for thread in threads:
        thread.join(10)
    assert passed == [5, 1, 5, 9]


def test_a_stage_that_fails_frees_its_place() -> None:
    turnstile = OrderedLock()
    with suppress(RuntimeError), turnstile.hold(Ticket(0)):
        raise RuntimeError("broken")
    _pass(turnstile, Ticket(1))


def _pass(turnstile: OrderedLock, ticket: Ticket) -> None:
    with turnstile.hold(ticket):
        pass


def _hold_until(turnstile: OrderedLock, ticket: Ticket, condition: Callable[[], bool]) -> None:
    with turnstile.hold(ticket):
        assert wait_until(condition, 10)
