"""Answers on a label page: kept one by one, by several people and processes at once, and equal to what the import reads."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections import Counter
from pathlib import Path

import pytest

from alignment_core.artifacts import Reference
from alignment_core.errors import UserError
from alignment_core.nights.labelling import GIVEN, PAIRS, Labelling, begun, folder_of
from alignment_core.nights.labels import id_of, imported


def pair(number: int) -> dict[str, str]:
    row = {"prompt": f"question {number}", "a": f"good {number}", "b": f"bad {number}", "source": "s"}
    return {"id": id_of(row), **row}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / PAIRS).write_text(
        "".join(json.dumps({**pair(number), "preferred": None}) + "\n" for number in range(40))
    )
    return tmp_path


def test_each_annotator_gets_every_pair_once_in_one_order_with_sides_of_their_own(folder: Path) -> None:
    labelling = Labelling(folder)
    seen: dict[str, list[tuple[str, str]]] = {}
    for who in ("ada", "bob"):
        while task := labelling.task(who):
            seen.setdefault(who, []).append((task.pair["id"], task.left))
            labelling.answer(who, task.pair["id"], "skip" if task.pair["id"][0] == "0" else "tie")
    ids = {who: [identity for identity, _ in tasks] for who, tasks in seen.items()}
    assert ids["ada"] == ids["bob"] == sorted(ids["ada"]) != [pair(number)["id"] for number in range(40)]
    assert len(set(ids["ada"])) == 40
    assert seen["ada"] != seen["bob"], "the sides are drawn for each of them"
    assert 8 <= Counter(left for _, left in seen["ada"])["a"] <= 32


def test_answers_are_those_that_the_import_reads(folder: Path) -> None:
    labelling = Labelling(folder)
    first, second, third, *_ = labelling.pairs
    labelling.answer("ada", first, "a")
    labelling.answer("ada", second, "b")
    labelling.undo("ada", second)
    labelling.undo("ada", second)  # the request came twice
    assert labelling.task("ada") == labelling.task_of(second, "ada")
    labelling.answer("ada", second, "both_bad")
    labelling.answer("ada", third, "a")
    labelling.answer("ada", third, "b")
    labelling.undo("bob", labelling.latest("bob"))
    for _ in range(2):
        labelling.undo("ada", labelling.latest("ada"))
    assert labelling.answers()["ada"] == {first: "a"}
    labels = imported(folder / GIVEN, folder / PAIRS)
    assert [(row["pair"], row["chosen"], row["annotators"]) for row in labels.rows] == [
        (first, labelling.pairs[first]["a"], ["ada"])
    ]
    assert labels.counts["malformed"] == 0


def test_a_line_that_a_kill_cut_off_costs_no_other(folder: Path) -> None:
    labelling = Labelling(folder)
    first, second, *_ = labelling.pairs
    labelling.answer("ada", first, "a")
    with (folder / GIVEN).open("a") as file:
        file.write('{"id": "' + second[:4])
    again = Labelling(folder)
    assert again.answers() == {"ada": {first: "a"}}
    again.answer("ada", second, "b")
    assert again.answers() == labelling.answers() == {"ada": {first: "a", second: "b"}}
    assert imported(folder / GIVEN, folder / PAIRS).counts["labelled"] == 2


def answer_all(folder: Path, annotator: str) -> None:
    labelling = Labelling(folder)
    while task := labelling.task(annotator):
        labelling.answer(annotator, task.pair["id"], task.left)


def test_processes_add_answers_to_one_file_at_once(folder: Path) -> None:
    people = ["ada", "bob", "eve"]
    running = [multiprocessing.get_context("spawn").Process(target=answer_all, args=(folder, who)) for who in people]
    for process in running:
        process.start()
    for process in running:
        process.join()
    labelling = Labelling(folder)
    assert {who: len(given) for who, given in labelling.answers().items()} == dict.fromkeys(people, 40)
    assert len((folder / GIVEN).read_text().splitlines()) == 120


def test_answers_that_a_backup_replaced_are_read_again(folder: Path) -> None:
    labelling = Labelling(folder)
    first, second, *_ = labelling.pairs
    labelling.answer("ada", first, "a")
    backup = labelling.file.read_bytes()
    labelling.answer("ada", second, "b")
    assert len(labelling.answers()["ada"]) == 2
    labelling.file.write_bytes(backup)
    assert labelling.answers() == {"ada": {first: "a"}}
    labelling.answer("ada", second, "a")
    assert labelling.answers() == {"ada": {first: "a", second: "a"}}


def test_agreement_by_chance_is_none(folder: Path) -> None:
    labelling = Labelling(folder)
    drawn = random.Random(0)
    for who in ("ada", "bob"):
        for identity in labelling.pairs:
            labelling.answer(who, identity, drawn.choice(("a", "b")))
    agreement = labelling.agreement()
    assert agreement is not None
    assert abs(agreement) < 0.35  # the standard deviation is 0.16
    assert imported(folder / GIVEN, folder / PAIRS).agreement == pytest.approx(agreement)


def test_agreement_counts_ties_and_bad_pairs_alike_and_leaves_skips_out(folder: Path) -> None:
    labelling = Labelling(folder)
    first, second, third, fourth, *_ = labelling.pairs
    for who, answers in {"ada": ("a", "tie", "b", "a"), "bob": ("a", "both_bad", "b", "skip")}.items():
        for identity, answer in zip((first, second, third, fourth), answers, strict=True):
            labelling.answer(who, identity, answer)
    assert labelling.agreement() == imported(folder / GIVEN, folder / PAIRS).agreement == 1.0


@pytest.mark.parametrize("name", ["", "  ", "x" * 65, "a\x1b[31m", "a\u202eb", "two\nlines"])
def test_a_name_that_would_deceive_others_is_refused(folder: Path, name: str) -> None:
    labelling = Labelling(folder)
    with pytest.raises(UserError, match="annotator"):
        labelling.answer(name, next(iter(labelling.pairs)), "a")
    with pytest.raises(UserError, match="one of a, b, tie, both_bad, skip, undo"):
        labelling.answer("ada", next(iter(labelling.pairs)), "better")
    with pytest.raises(UserError, match="no such pair"):
        labelling.answer("ada", "0" * 20, "a")
    assert not labelling.file.exists()


def test_rounds_that_were_begun_are_listed_the_latest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_HOME", str(tmp_path))
    assert begun() == []
    references = [Reference(kind="scores", digest=digit * 64) for digit in "12"]
    for number, reference in enumerate(references):
        folder = folder_of(reference)
        folder.mkdir(parents=True)
        (folder / PAIRS).write_text("")
        import os

        os.utime(folder, (number, number))
    (tmp_path / "labels" / "not-begun").mkdir()
    (tmp_path / "labels" / "scores-old-copy").mkdir()
    (tmp_path / "labels" / "scores-old-copy" / PAIRS).write_text("")
    assert begun() == references[::-1]
