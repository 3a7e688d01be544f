"""Rows that a night takes: each row once, none lost, despite deaths and concurrent nights."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from alignment_core.artifacts import collect, open_store
from alignment_core.canonical import digest_of_file
from alignment_core.errors import UserError
from alignment_core.lineage import Graph, Tree
from alignment_core.nights import ledger as ledger_module
from alignment_core.nights.ledger import LISTED, MAX_FAILED_ATTEMPTS, AlreadyRuns, Claim, Ledger, Night, summary
from alignment_core.stages.dataset import ROWS
from tests.nights.conftest import pair
from tests.processes import ended, in_child, kill_at, wait_until

PRODUCTION = "policy/production"


@pytest.fixture
def ledger(store, recipe) -> Ledger:
    return Ledger(store, recipe())


def taken(ledger: Ledger, night: Night) -> list[str]:
    """The prompts of a night's rows."""
    assert night.batch is not None
    lines = (ledger.store.fetch(night.batch) / ROWS).read_text().splitlines()
    return [json.loads(line)["prompt"].removeprefix("prompt ") for line in lines]


def begin_and_die(ledger: Ledger, name: str) -> None:
    """A night whose process is killed once it has taken its rows."""

    def night() -> None:
        with ledger.claim(name):
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(night)) == -signal.SIGKILL


def whole_night(ledger: Ledger, name: str, state: str = "refused", **fields: Any) -> Claim:
    with ledger.claim(name) as claim:
        if claim.night.state == "claimed":
            ledger.record(claim.night.model_copy(update={"state": state, **fields}))
    return claim


def check_linear(ledger: Ledger) -> None:
    moves = ledger.store.tags.history(ledger.tag)
    assert [move.number for move in moves] == list(range(1, len(moves) + 1))
    assert [move.previous for move in moves] == [None, *(move.to for move in moves)][:-1]


# ------------------------------------------------------------------ night after night


def test_the_summary_of_a_night_has_the_share_of_weights_that_it_changed():
    night = Night(night="mon", state="promoted", rows=200, changed_weights={"dpo": 0.4, "round-1/dpo": 0.0312})
    assert summary(night) == "night mon: promoted, 200 rows, share of changed weights 0.4 by dpo, 0.031 by round-1/dpo"
    assert Night.model_validate(night.model_dump(exclude={"changed_weights"})).changed_weights == {}


def test_each_night_takes_the_rows_since_the_last_night_and_empty_nights_are_recorded(ledger, drop):
    drop("a.jsonl", pair(1), pair(2))
    assert taken(ledger, whole_night(ledger, "mon").night) == ["1", "2"]
    assert whole_night(ledger, "tue").night.state == "empty"
    drop("a.jsonl", pair(3))  # late, in a file that was read before
    drop("b.jsonl", pair(2), pair(4))  # and one that was there already
    assert taken(ledger, whole_night(ledger, "wed").night) == ["3", "4"]
    entries = [(night.night, night.state, night.rows) for night in ledger.nights()]
    assert entries == [
        ("mon", "claimed", 2),
        ("mon", "refused", 2),
        ("tue", "empty", 0),
        ("wed", "claimed", 2),
        ("wed", "refused", 2),
    ]
    check_linear(ledger)


def test_rows_that_are_too_few_wait(store, recipe, drop, inbox):
    ledger = Ledger(store, recipe(min_rows=3))
    drop("a.jsonl", pair(1), pair(2))
    night = whole_night(ledger, "mon").night
    assert (night.state, night.rows, night.batch) == ("empty", 2, None)
    assert summary(night) == f"night mon: empty, 2 rows waiting ({inbox}: 1 file, 2 rows, 2 new)"
    drop("a.jsonl", pair(3))
    assert taken(ledger, whole_night(ledger, "tue").night) == ["1", "2", "3"]


def test_malformed_rows_are_counted_listed_up_to_a_limit_and_left(ledger, drop, inbox):
    drop("a.jsonl", pair(1), *["{}\n"] * (LISTED + 5))
    night = whole_night(ledger, "mon").night
    assert (night.rows, night.malformed_rows, len(night.malformed)) == (1, LISTED + 5, LISTED)
    assert night.malformed[0].startswith("a.jsonl:2: ")
    looked = f"{inbox}: 1 file, {LISTED + 6} rows, 1 new"
    assert summary(night) == f"night mon: takes 1 row, {LISTED + 5} malformed ({looked})"
    assert whole_night(ledger, "tue").night.malformed_rows == LISTED + 5


def test_a_finished_night_is_not_repeated(ledger, drop):
    drop("a.jsonl", pair(1))
    whole_night(ledger, "mon")
    whole_night(ledger, "tue")
    drop("a.jsonl", pair(2))
    assert whole_night(ledger, "mon").night.state == "refused"
    assert whole_night(ledger, "tue").night.state == "empty"
    assert len(ledger.nights()) == 3


def test_a_metric_that_is_not_finite_leaves_the_ledger_readable(ledger, drop):
    """JSON has no infinity: as null, it would have ended every later night."""
    drop("a.jsonl", pair(1), pair(2))
    metrics = {"candidate": {"lm_eval/words/word_perplexity": math.inf, "lm_eval/words/f1": math.nan}}
    whole_night(ledger, "1", metrics=metrics)
    drop("a.jsonl", pair(3), pair(4))
    assert whole_night(ledger, "2").night.rows == 2
    kept = ledger.nights()[1].metrics["candidate"]
    assert kept["lm_eval/words/word_perplexity"] == math.inf
    assert math.isnan(kept["lm_eval/words/f1"])


def test_only_recipes_of_the_same_inbox_share_rows(store, recipe, drop):
    drop("a.jsonl", pair(1))
    first, other_inbox, same = (Ledger(store, recipe(inbox=name)) for name in ("one", "other", "one"))
    assert taken(first, whole_night(first, "mon").night) == ["1"]
    assert taken(other_inbox, whole_night(other_inbox, "mon").night) == ["1"]
    assert whole_night(same, "tue").night.state == "empty"


def test_an_inbox_that_does_not_exist_is_refused_and_takes_nothing(store, recipe, tmp_path):
    ledger = Ledger(store, recipe(str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="no such file or folder"), ledger.claim("mon"):
        pass
    assert ledger.nights() == []


def test_the_lineage_of_a_batch_names_its_files(ledger, drop, inbox):
    drop("a.jsonl", pair(1), pair(2))
    drop("b.jsonl", pair(3))
    digests = {name: digest_of_file(inbox / name) for name in ("a.jsonl", "b.jsonl")}
    night = whole_night(ledger, "mon").night
    drop("a.jsonl", pair(4))  # the digest is of the file as the night read it
    assert night.batch is not None
    with Graph.of(ledger.store) as graph:
        tree = Tree(graph, night.batch, upward=True)
    sources = [(source.path, source.rows, source.sha256) for source in tree.nodes[night.batch].sources]
    assert sources == [("a.jsonl", 2, digests["a.jsonl"]), ("b.jsonl", 1, digests["b.jsonl"])]


def test_the_garbage_collector_keeps_the_rows_of_every_night(ledger, drop):
    drop("a.jsonl", pair(1))
    night = whole_night(ledger, "mon").night
    collect(ledger.store, delete=True, older_than=-1)
    assert ledger.store.verify(night.batch) == []
    assert whole_night(ledger, "tue").night.state == "empty"


# ------------------------------------------------------------------ nights that die


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_night_killed_at_any_point_loses_no_row_and_takes_none_twice(recipe, drop, tmp_path):
    drop("a.jsonl", pair(1), pair(2))
    for step in range(1, 200):
        ledger = Ledger(open_store(tmp_path / f"store-{step}"), recipe())

        def night(ledger=ledger, step=step):
            kill_at(step)
            whole_night(ledger, "mon")

        code = ended(in_child(night))
        following = whole_night(ledger, "tue").night
        if code == 0:
            break
        assert code == -signal.SIGKILL
        states = [(night.night, night.state) for night in ledger.nights()]
        if states[:2] == [("mon", "claimed"), ("mon", "refused")]:  # killed after its last entry
            assert following.state == "empty"
        else:
            assert taken(ledger, following) == ["1", "2"]
            assert following.attempt == (2 if states[0] == ("mon", "claimed") else 1)
        check_linear(ledger)
    assert step > 20


def test_an_interrupted_night_continues_with_its_rows_and_makes_no_second_entry(ledger, drop):
    drop("a.jsonl", pair(1))
    begin_and_die(ledger, "mon")
    drop("a.jsonl", pair(2))
    with ledger.claim("mon") as claim:
        assert taken(ledger, claim.night) == ["1"]
        assert claim.night == ledger.nights()[-1]
    assert len(ledger.nights()) == 1


def test_the_next_night_adopts_the_rows_of_a_dead_night_and_new_rows_wait(ledger, drop):
    drop("a.jsonl", pair(1))
    begin_and_die(ledger, "mon")
    drop("a.jsonl", pair(2))
    tuesday, wednesday = whole_night(ledger, "tue"), whole_night(ledger, "wed")
    assert taken(ledger, tuesday.night) == ["1"]
    assert tuesday.night.batch == ledger.nights()[0].batch  # the very artifact: finished stages are found again
    assert (tuesday.night.attempt, tuesday.batches_before, wednesday.batches_before) == (2, 0, 1)
    assert taken(ledger, wednesday.night) == ["2"]


def test_the_oldest_rows_of_dead_nights_go_first(ledger, drop):
    drop("a.jsonl", pair(1))
    with ledger.claim("mon") as monday:
        drop("a.jsonl", pair(2))
        begin_and_die(ledger, "tue")
        assert monday.night.state == "claimed"
    assert [taken(ledger, whole_night(ledger, name).night) for name in ("wed", "thu")] == [["1"], ["2"]]


def test_rows_of_repeatedly_dying_nights_are_given_up_and_the_schedule_continues(ledger, drop):
    drop("a.jsonl", pair(1))
    for number in range(MAX_FAILED_ATTEMPTS):
        begin_and_die(ledger, f"night-{number}")
    drop("a.jsonl", pair(2))
    claim = whole_night(ledger, "last")
    assert taken(ledger, claim.night) == ["2"]
    (lost,) = claim.given_up
    last = f"night-{MAX_FAILED_ATTEMPTS - 1}"
    assert (lost.night, lost.state, taken(ledger, lost)) == (last, "given_up", ["1"])
    assert lost.reasons[0] == "the process of its night died"
    assert "given up after 4 attempts" in lost.reasons[1]
    states = ["claimed"] * MAX_FAILED_ATTEMPTS + ["given_up", "claimed", "refused"]
    assert [night.state for night in ledger.nights()] == states
    check_linear(ledger)


@pytest.mark.parametrize("state", ["failed", "conflict", "stopped"])
def test_rows_that_did_not_cause_a_nights_outcome_are_taken_again_without_limit(ledger, drop, state):
    drop("a.jsonl", pair(1))
    attempts = [whole_night(ledger, f"night-{number}", state).night.attempt for number in range(6)]
    assert attempts == [1, 2, 3, 4, 5, 6]
    assert taken(ledger, whole_night(ledger, "last").night) == ["1"]


# ------------------------------------------------------------------ where a night starts from


def test_a_night_starts_from_production_at_the_time_of_its_claim(ledger, drop, train):
    drop("a.jsonl", pair(1))
    with ledger.claim("mon") as claim:
        assert claim.night.production is None
    first = train("first")
    ledger.store.tags.move(PRODUCTION, first, None, "by hand")
    drop("a.jsonl", pair(2))
    whole_night(ledger, "mon")
    assert whole_night(ledger, "tue").night.production == first


def test_rows_that_lost_the_race_start_from_the_new_production(ledger, drop, train):
    drop("a.jsonl", pair(1))
    whole_night(ledger, "mon", "conflict")
    winner = train("winner")
    ledger.store.tags.move(PRODUCTION, winner, None, "another night")
    assert whole_night(ledger, "tue").night.production == winner


def test_rows_of_a_night_that_died_after_its_promotion_are_not_trained_on_again(ledger, drop, train):
    parent = train("parent")
    ledger.store.tags.move(PRODUCTION, parent, None, "by hand")
    drop("a.jsonl", pair(1))
    begin_and_die(ledger, "mon")
    batch = ledger.nights()[0].batch
    candidate = train("candidate", model=parent, data=train("pairs", rows=batch))
    ledger.store.tags.move(PRODUCTION, candidate, parent, "gates passed")
    ledger.store.tags.move(PRODUCTION, train("later", model=candidate), candidate, "another night")
    adopted = whole_night(ledger, "tue").night
    assert (adopted.batch, adopted.production) == (batch, parent)  # so that all its stages are found in the store


# ------------------------------------------------------------------ nights that overlap


def test_overlapping_nights_take_different_rows(ledger, drop):
    drop("a.jsonl", pair(1))
    with ledger.claim("mon") as monday:
        drop("a.jsonl", pair(2))
        with ledger.claim("tue") as tuesday, ledger.claim("wed") as wednesday:
            assert taken(ledger, monday.night) == ["1"]
            assert taken(ledger, tuesday.night) == ["2"]
            assert wednesday.night.state == "empty"


def test_the_same_night_does_not_run_twice_at_once(ledger, drop, monkeypatch):
    drop("a.jsonl", pair(1))
    monkeypatch.setattr(ledger_module, "STOPPING_SECONDS", 0.2)
    with ledger.claim("mon"):
        with pytest.raises(AlreadyRuns, match="is being run"), ledger.claim("mon"):
            pass
        assert len(ledger.nights()) == 1


def test_a_night_of_another_machine_is_taken_over_only_after_that_machine_is_gone(
    bucket, recipe, drop, tmp_path, monkeypatch
):
    """They share nothing but a store in S3."""
    drop("a.jsonl", pair(1))

    def at(machine):
        monkeypatch.setenv("ALIGN_HOME", str(tmp_path / machine))
        return Ledger(open_store(f"s3://{bucket}/{tmp_path.name}"), recipe())

    theirs, (over, done) = at("theirs"), os.pipe()

    def night():
        with theirs.claim("mon"):
            os.read(over, 1)
            os.kill(os.getpid(), signal.SIGKILL)

    child = in_child(night)
    assert wait_until(lambda: len(theirs.nights()) == 1, 30)
    ours = at("ours")
    with monkeypatch.context() as impatient:
        impatient.setattr(ledger_module, "STOPPING_SECONDS", 0.2)
        with pytest.raises(AlreadyRuns, match="is being run"), ours.claim("mon"):
            pass
    os.write(done, b"!")
    assert ended(child) == -signal.SIGKILL
    assert taken(ours, whole_night(ours, "mon").night) == ["1"]


def test_processes_that_begin_at_the_same_moment_take_each_row_once(ledger, drop):
    drop("a.jsonl", *map(pair, range(20)))
    start, go = os.pipe()

    def night(number: int) -> Callable[[], None]:
        def run() -> None:
            os.close(go)
            os.read(start, 1)  # until the parent closes its end
            drop("a.jsonl", pair(100 + number))
            whole_night(ledger, f"night-{number}")

        return run

    children = [in_child(night(number)) for number in range(6)]
    os.close(go)
    os.close(start)
    assert [ended(child) for child in children] == [0] * 6
    whole_night(ledger, "last")
    claimed = [night for night in ledger.nights() if night.state == "claimed"]
    prompts = [prompt for night in claimed for prompt in taken(ledger, night)]
    assert sorted(map(int, prompts)) == [*range(20), *range(100, 106)]
    check_linear(ledger)
