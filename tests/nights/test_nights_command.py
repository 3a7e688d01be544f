"""The command `align nights`: rows that were given up are listed, returned and discarded."""

from __future__ import annotations

import json
from functools import partial

import pytest

from alignment.flows.cli.run import GAVE_UP_ROWS, _print_outcomes
from alignment_core import errors
from alignment_core.nights.ledger import Ledger
from tests.align import align_here
from tests.nights.conftest import pair
from tests.nights.test_ledger import taken, whole_night
from tests.nights.test_stops import give_up


@pytest.fixture
def ledger(store, recipe) -> Ledger:
    return Ledger(store, recipe())


def test_rows_that_were_given_up_are_listed_with_their_reason_and_returned(ledger, drop, tmp_path):
    align = partial(align_here, tmp_path)
    where = ("--store", str(tmp_path / "store"))
    batch = give_up(ledger, drop, 1)
    whole_night(ledger, "empty")
    drop("b.jsonl", pair(2))
    whole_night(ledger, "whole")

    everything = json.loads(align("nights", "list", *where, "--json").stdout)
    assert [night["state"] for night in everything["owl"]] == ["given_up", "refused"]
    listed = align("nights", "list", "owl", "--given-up", *where)
    assert str(batch) in listed.stdout.replace("\n", "")
    assert "the loss is not finite" in " ".join(listed.stdout.split())

    returned = align("nights", "return", "owl", batch.digest[:12], *where)
    assert (returned.returncode, "returned, 1 row" in returned.stdout) == (0, True)
    assert taken(ledger, whole_night(ledger, "next").night) == ["1"]


def test_unknown_names_are_refused_with_the_known_ones(ledger, drop, tmp_path):
    align = partial(align_here, tmp_path)
    where = ("--store", str(tmp_path / "store"))
    batch = give_up(ledger, drop, 1)
    unknown = align("nights", "list", "crow", *where)
    assert (unknown.returncode, "there are owl" in unknown.stderr) == (errors.UserError.exit_code, True)
    for digits in (
        "ffff",
        "",
        "preference-batch:",
    ):  # nothing, as of a variable of the shell that is not set, names no rows
        wrong = align("nights", "discard", "owl", digits, *where)
        assert (wrong.returncode, batch.short in wrong.stderr.replace("\n", "")) == (errors.UserError.exit_code, True)


def test_a_night_that_gives_rows_up_has_its_own_exit_code(capsys, ledger, drop):
    entry = {"night": "thu", "state": "given_up", "rows": 3, "failed_attempts": 4}
    night = {"night": "fri", "state": "empty", "failed_attempts": 0}
    outcome = {"night": night, "given_up": [entry], "promotion": None, "stages": []}
    with pytest.raises(Exception) as end:  # noqa: PT011 (typer's own kind of exception)
        _print_outcomes([outcome], as_json=False)
    assert getattr(end.value, "exit_code", None) == GAVE_UP_ROWS == 6
    assert "night thu: 3 rows given up" in capsys.readouterr().out
