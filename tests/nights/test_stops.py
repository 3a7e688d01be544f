"""The end of a night decides whether its rows are suspected: only ends that the rows may have caused count towards this.

The expected counts follow docs/recipes/nights.md: four attempts that died or failed in training give rows up;
any number of orderly stops, outages, wrong recipes and lost races does not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest

from alignment_core import errors, journal
from alignment_core.artifacts import Reference
from alignment_core.nights.attempt import attempt, may_be_caused_by_rows
from alignment_core.nights.ledger import MAX_FAILED_ATTEMPTS, History, Ledger, Night, inboxes
from tests.nights.conftest import pair
from tests.nights.test_ledger import PRODUCTION, begin_and_die, taken, whole_night
from tests.processes import ended, in_child


@pytest.fixture
def ledger(store, recipe) -> Ledger:
    return Ledger(store, recipe())


def begin_stage(log: journal.Journal, night: Night, data: Reference | None = None) -> None:
    """Note that a stage of this data, by default the night's rows, is under way."""
    log.stage("rows", "running", stage="dataset", key="k", key_parts={"inputs": {"rows": str(data or night.batch)}})


def nobody(_night: Night) -> None:
    """Announce nothing."""


def night_that_ends(ledger: Ledger, name: str, error: BaseException, run: str = "") -> Night:
    with pytest.raises(type(error)), attempt(ledger, Night(night=name, run=run), nobody):
        raise error
    return ledger.nights()[-1]


def terminated(ledger: Ledger, name: str) -> None:
    """A night whose process gets SIGTERM and ends as the command `align` does."""

    def night() -> None:
        def stop(*_: object) -> None:
            raise SystemExit(143)

        signal.signal(signal.SIGTERM, stop)
        with attempt(ledger, Night(night=name), nobody):
            os.kill(os.getpid(), signal.SIGTERM)

    assert ended(in_child(night)) == 1  # as `in_child` reports an exception


# ------------------------------------------------------------------ ends that do not count


def test_rows_of_nights_stopped_repeatedly_by_sigterm_are_taken_by_the_next_night(ledger, drop):
    drop("a.jsonl", pair(1))
    for number in range(MAX_FAILED_ATTEMPTS + 1):
        terminated(ledger, f"night-{number}")
    night = whole_night(ledger, "last").night
    assert (taken(ledger, night), night.attempt, night.failed_attempts) == (["1"], 6, 0)
    assert [night.state for night in ledger.nights()][1::2] == ["stopped"] * 5 + ["refused"]


@pytest.mark.parametrize(
    "error",
    [
        errors.Stopped("the run was stopped"),
        KeyboardInterrupt(),
        errors.Unavailable("cannot read s3://bucket/prefix: the server does not answer"),
        errors.StillUnavailable("dpo: the server does not answer (failed 4 times)"),
        errors.EnvironmentFault("the disk is full"),
        errors.UserError("evaluation.prompts: there is no such file"),
        errors.Corrupt("bytes do not have the digest of their manifest"),
        ConnectionError("the Prefect API is away"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_ending_that_is_not_in_the_rows_does_not_count(ledger, drop, error):
    drop("a.jsonl", pair(1))
    for number in range(MAX_FAILED_ATTEMPTS + 1):
        entry = night_that_ends(ledger, f"night-{number}", error)
        assert (entry.failed_attempts, entry.attempt) == (0, number + 1)
    assert taken(ledger, whole_night(ledger, "last").night) == ["1"]


def test_a_night_that_was_cancelled_is_on_record_as_stopped_and_announces_nothing(ledger, drop):
    """So is one whose run another attempt owns: both end without an error."""
    drop("a.jsonl", pair(1))
    announced: list[Night] = []
    with attempt(ledger, Night(night="mon"), announced.append) as mine:
        mine.stop("the run was cancelled")
    last = ledger.nights()[-1]
    assert (last.state, last.reasons, last.failed_attempts, announced) == ("stopped", ("the run was cancelled",), 0, [])
    assert taken(ledger, whole_night(ledger, "tue").night) == ["1"]


def test_a_stop_while_the_rows_are_being_claimed_is_on_record(ledger, drop, monkeypatch):
    drop("a.jsonl", pair(1))
    append = ledger._append

    def appended_then_stopped(night, head):
        append(night, head)
        raise SystemExit(143)

    monkeypatch.setattr(ledger, "_append", appended_then_stopped)
    monkeypatch.setattr(ledger, "record", lambda night: append(night, ledger.store.tags.get(ledger.tag)))
    with pytest.raises(SystemExit), attempt(ledger, Night(night="mon"), nobody):
        pass
    assert [night.state for night in ledger.nights()] == ["claimed", "stopped"]


@pytest.mark.parametrize("status", ["stopped", "failed", "cancelled"])
def test_a_nights_unwritten_end_is_recovered_from_the_journal_of_its_run(ledger, drop, status, tmp_path, monkeypatch):
    """As where the store was away when the run ended."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    drop("a.jsonl", pair(1))

    def night() -> None:
        with ledger.claim("mon", "run-1") as claim:
            log = journal.Journal(journal.new_record("run-1", "owl", {}, ledger.store.uri))
            with log.open():
                begin_stage(log, claim.night)
                log.end(status)
                os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(night)) == -signal.SIGKILL
    assert whole_night(ledger, "tue").night.failed_attempts == 0


def test_a_death_outside_stages_of_the_rows_is_not_counted_against_the_rows(ledger, drop, train, tmp_path, monkeypatch):
    """As before the first stage, or while the reward model was trained on other pairs."""
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path / "home"))
    drop("a.jsonl", pair(1))
    others = train("other pairs")

    def night(name: str, of: Callable[[Night], Reference | None]) -> None:
        with ledger.claim(name, name) as claim:
            log = journal.Journal(journal.new_record(name, "owl", {}, ledger.store.uri))
            with log.open():
                if data := of(claim.night):
                    begin_stage(log, claim.night, data)
                os.kill(os.getpid(), signal.SIGKILL)

    cases: list[Callable[[Night], Reference | None]] = [
        lambda _: None,
        lambda _: others,
        lambda night: night.batch,
        lambda night: train("tokens", data=night.batch),
    ]
    for number, of in enumerate(cases):
        assert ended(in_child(partial(night, f"night-{number}", of))) == -signal.SIGKILL
    whole_night(ledger, "last")
    assert [night.failed_attempts for night in ledger.nights() if night.state == "claimed"] == [0, 0, 0, 1, 2]


def test_a_failure_of_a_stage_without_the_rows_does_not_count(ledger, drop, train, home):
    """As where the prompts of the evaluation are broken: its DataError is about another file."""
    drop("a.jsonl", pair(1))

    def fail(name: str, data: Reference | None) -> None:
        with attempt(ledger, Night(night=name, run=name), nobody) as mine:
            log = journal.Journal(journal.new_record(name, "owl", {}, ledger.store.uri))
            with log.open():
                begin_stage(log, mine.night, data)
                raise errors.DataError("line 1: there is no prompt")

    def failed_attempts(name: str, data: Reference | None) -> int:
        with pytest.raises(errors.DataError):
            fail(name, data)
        return ledger.nights()[-1].failed_attempts

    assert failed_attempts("mon", train("prompts of the evaluation")) == 0
    assert failed_attempts("tue", None) == 1


# ------------------------------------------------------------------ ends that count


@pytest.mark.parametrize(
    "error",
    [
        errors.NumericError("the loss is not finite"),
        errors.OutOfMemory("no smaller size is left to try"),
        errors.DataError("no row is short enough"),
        errors.RestartsExhausted("an actor died (failed 4 times)"),
        errors.AlignmentError("TypeError: in a stage"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_rows_are_given_up_at_the_last_failure_of_their_stages_with_the_reason(ledger, drop, error):
    drop("a.jsonl", pair(1))
    states = [night_that_ends(ledger, f"night-{number}", error).state for number in range(MAX_FAILED_ATTEMPTS)]
    assert states == ["failed", "failed", "failed", "given_up"]
    last = ledger.nights()[-1]
    assert str(error) in last.reasons[0]
    assert "align nights return" in last.reasons[1]
    assert whole_night(ledger, "last").night.state == "empty"


def test_orderly_stops_between_deaths_neither_count_nor_clear(ledger, drop):
    drop("a.jsonl", pair(1))
    for number in range(3):
        begin_and_die(ledger, f"dies-{number}")
        terminated(ledger, f"stops-{number}")
    assert ledger.nights()[-1].failed_attempts == 3
    begin_and_die(ledger, "dies-3")
    (given_up,) = whole_night(ledger, "last").given_up
    assert (given_up.failed_attempts, taken(ledger, given_up)) == (4, ["1"])


def test_every_error_class_is_classified_as_counting_or_not():
    counted = {"AlignmentError", "DataError", "DeadlineExceeded", "InfrastructureError", "NumericError", "OutOfMemory"}
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AlignmentError)
    ]
    counted |= {"PeerFailed", "RestartsExhausted"}  # of an actor that died
    counted |= {"GpuOccupied"}  # a row may be too long for what an engine leaves
    assert {kind.__name__ for kind in kinds if may_be_caused_by_rows(kind("no"))} == counted


# ------------------------------------------------------------------ rows that were given up


def give_up(ledger: Ledger, drop, number: int) -> Reference:
    drop("a.jsonl", pair(number))
    for attempts in range(MAX_FAILED_ATTEMPTS):
        night_that_ends(ledger, f"row-{number}-{attempts}", errors.NumericError("the loss is not finite"))
    batch = ledger.nights()[-1].batch
    assert batch is not None
    return batch


def test_rows_that_were_given_up_are_listed_and_returned_to_the_next_night_with_all_their_attempts(ledger, drop):
    batch = give_up(ledger, drop, 1)
    history = History(ledger.store, "owl")
    assert [night.batch for night in history.given_up()] == [batch]
    history.decide(batch.digest[:12], "returned")
    assert history.given_up() == []
    night = whole_night(ledger, "next").night
    assert (taken(ledger, night), night.failed_attempts) == (["1"], 0)


def test_rows_that_were_discarded_are_taken_no_more(ledger, drop):
    batch = give_up(ledger, drop, 1)
    History(ledger.store, "owl").decide(str(batch), "discarded")
    assert whole_night(ledger, "next").night.state == "empty"
    assert ledger.given_up() == []


def test_only_rows_that_were_given_up_can_be_returned(ledger, drop):
    first, second = give_up(ledger, drop, 1), give_up(ledger, drop, 2)
    for name in ("", "preference-batch@sha256:"):
        with pytest.raises(errors.UserError, match="is not a batch that was given up"):
            ledger.decide(name, "returned")
    ledger.decide(str(first), "returned")
    with pytest.raises(errors.UserError, match=f"is not a batch that was given up .*{second.short}"):
        ledger.decide(str(first), "returned")


def test_the_ledgers_of_a_store_are_found_by_their_names(store, recipe, drop):
    drop("a.jsonl", pair(1))
    for name in ("b", "a"):
        whole_night(Ledger(store, recipe(inbox=name)), "mon")
    assert inboxes(store) == ["a", "b"]


# ------------------------------------------------------------------ attempts that overlap


def test_a_late_failure_does_not_reopen_rows_that_another_night_has_used(ledger, drop):
    """As of a process that was paused until its lease expired, and continues after another night."""
    drop("a.jsonl", pair(1))
    with ledger.claim("mon") as late:
        pass  # the lease has expired, the night continues
    whole_night(ledger, "tue")
    for state in ("failed", "stopped", "conflict"):
        ledger.record(late.night.model_copy(update={"state": state}))
    assert [night.state for night in ledger.nights()] == ["claimed", "claimed", "refused"]
    assert whole_night(ledger, "wed").night.state == "empty"


def test_a_night_that_loses_to_another_attempt_at_the_same_rows_counts_as_promoted(ledger, drop, train):
    drop("a.jsonl", pair(1))
    with ledger.claim("mon") as late:
        pass
    with attempt(ledger, Night(night="tue"), nobody) as mine:
        candidate = train("candidate", data=train("pairs", rows=late.night.batch))
        ledger.store.tags.move(PRODUCTION, candidate, None, "the late night promotes")
        mine.end(mine.night.model_copy(update={"state": "conflict", "reasons": ("moved",)}))
    assert mine.night.state == "promoted"
    assert whole_night(ledger, "wed").night.state == "empty"
