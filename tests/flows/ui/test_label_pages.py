"""Labelling without a script: from a round to rows in an inbox."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from alignment.flows.ui.app import application
from alignment_core.artifacts import Reference, Store
from alignment_core.journal import Journal, new_record
from alignment_core.nights.inbox import read_inbox
from alignment_core.nights.labelling import folder_of
from alignment_core.nights.labels import id_of
from alignment_core.recipes import DataSource
from tests.answered import publish_round
from tests.flows.ui.conftest import ORIGIN, TOKEN, Make
from tests.flows.ui.test_pages import HOSTILE

PAIRS = [{"prompt": f"question {n}", "a": f"good {n}", "b": f"bad {n}", "source": "s"} for n in range(3)]


@pytest.fixture
def round_(store: Store, tmp_path: Path) -> Reference:
    return publish_round(store, tmp_path / "made")[1]


def write_pairs(reference: Reference, rows: list[dict[str, Any]]) -> Path:
    folder = folder_of(reference)
    folder.mkdir(parents=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"id": id_of(row), **row}) + "\n" for row in rows))
    return folder


def another(store: Store, name: str) -> TestClient:
    """A second browser, signed in, with an annotator's name."""
    client = TestClient(application(store, TOKEN), base_url=ORIGIN, follow_redirects=False, headers={"Origin": ORIGIN})
    client.get(f"/runs?token={TOKEN}")
    client.cookies.set("annotator", name.encode().hex())
    return client


def hidden(page: str) -> dict[str, str]:
    """The hidden fields of the form."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))


def identity(page: str) -> str:
    return hidden(page)["pair"]


@pytest.mark.slow
def test_pairs_are_made_in_the_page(signed_in: TestClient, round_: Reference) -> None:
    assert f"/labels/{round_}" in signed_in.get("/labels").text
    assert "Make the pairs" in signed_in.get(f"/labels/{round_}").text
    for most in ("x", "0", "9" * 5000, "-1"):
        assert signed_in.post(f"/labels/{round_}/begin", data={"most": most}).status_code == 400
    assert signed_in.post(f"/labels/{round_}/begin", data={"most": "2"}).status_code == 303
    pairs = [json.loads(line) for line in (folder_of(round_) / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 2
    assert {frozenset((pair["a"][:6], pair["b"][:6])) for pair in pairs} == {frozenset(("a good", "a bad "))}


@pytest.mark.slow
def test_a_round_without_two_different_completions_is_named(
    signed_in: TestClient, store: Store, tmp_path: Path
) -> None:
    _, scores = publish_round(store, tmp_path / "made", texts=("the same",))
    answer = signed_in.post(f"/labels/{scores}/begin", data={})
    assert answer.status_code == 400
    assert "no whole prompt has two different completions" in answer.text


def test_from_answers_of_two_annotators_to_an_inbox(
    signed_in: TestClient, store: Store, round_: Reference, tmp_path: Path
) -> None:
    write_pairs(round_, PAIRS)
    assert "Your name" in signed_in.get(f"/labels/{round_}").text
    assert signed_in.post(f"/labels/{round_}/annotator", data={"annotator": " ada  l "}).status_code == 303
    bob = another(store, "bob")
    for number in range(3):
        for client, answer in ((signed_in, "a"), (bob, "a" if number else "tie")):
            page = client.get(f"/labels/{round_}").text
            assert f"{number} of 3" in page
            done = client.post(f"/labels/{round_}/answer", data={**hidden(page), "answer": answer})
            assert (done.status_code, done.headers["location"]) == (303, f"/labels/{round_}")
        if number < 2:
            results = signed_in.get(f"/labels/{round_}/results").text
            assert "answers of others are shown once you have answered all pairs" in results
            assert "Krippendorff" not in results
            assert "There are" not in results, "which would tell whether others agree"
            assert f"{number + 1} of 3" in results
    assert "All 3 pairs have your answer" in signed_in.get(f"/labels/{round_}").text
    results = signed_in.get(f"/labels/{round_}/results").text
    assert "ada l" in results
    assert "Krippendorff&#39;s α" in results or "Krippendorff's α" in results
    stranger = TestClient(application(store, TOKEN), base_url=ORIGIN)
    stranger.cookies.set("annotator", b"ada l".hex())
    assert "answers of others are shown" in stranger.get(f"/labels/{round_}/results").text, "a name is no token"
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    assert signed_in.post(f"/labels/{round_}/inbox", data={"inbox": str(inbox)}).status_code == 400, "of no nightly run"
    recipe = {"method": "nightly", "dpo": {"data": f"{inbox}/*.jsonl"}}
    with Journal(new_record("0eb1c584-1111", "nightly", recipe, store.uri)).open():
        pass
    added = signed_in.post(f"/labels/{round_}/inbox", data={"inbox": str(inbox)}).text
    assert "The new rows are in" in added
    rows = [json.loads(line) for path in inbox.iterdir() for line in path.read_text().splitlines()]
    assert len(read_inbox([DataSource(path=str(inbox))], set(), store).rows) == len(rows)
    assert all(row["pair"] and row["annotators"] and row["labelled_at"] for row in rows)
    again = signed_in.post(f"/labels/{round_}/inbox", data={"inbox": str(inbox)}).text
    assert "There is no new row" in again


def test_undo_shows_the_pair_again_and_skip_leaves_it(signed_in: TestClient, round_: Reference) -> None:
    write_pairs(round_, PAIRS)
    signed_in.cookies.set("annotator", b"ada".hex())
    fields = hidden(signed_in.get(f"/labels/{round_}").text)
    first = fields["pair"]
    fragment = signed_in.post(
        f"/labels/{round_}/answer", data={**fields, "answer": "skip"}, headers={"X-Fragment": "1"}
    )
    assert fragment.status_code == 200
    assert fragment.text.startswith("<form")
    assert identity(fragment.text) != first
    second = hidden(fragment.text)
    assert second["latest"] == first
    signed_in.post(f"/labels/{round_}/answer", data={**second, "answer": "b"})
    for _ in range(3):  # one press whose answer was lost
        signed_in.post(f"/labels/{round_}/answer", data={**second, "latest": second["pair"], "answer": "undo"})
    assert identity(signed_in.get(f"/labels/{round_}").text) == second["pair"]


def test_a_page_of_another_annotator_keeps_no_answer(signed_in: TestClient, round_: Reference) -> None:
    """Its left may be the other completion."""
    folder = write_pairs(round_, PAIRS)
    signed_in.cookies.set("annotator", b"ada".hex())
    fields = hidden(signed_in.get(f"/labels/{round_}").text)
    signed_in.cookies.set("annotator", b"bob".hex())
    answer = signed_in.post(f"/labels/{round_}/answer", data={**fields, "answer": "a"}, headers={"X-Fragment": "1"})
    assert (answer.status_code, "load it again" in answer.text) == (409, True)
    assert not (folder / "answers.jsonl").exists()


def test_what_is_no_answer_or_no_round_is_refused(signed_in: TestClient, round_: Reference, make: Make) -> None:
    assert signed_in.post(f"/labels/{round_}/answer", data={"answer": "a"}).status_code == 404, "no pairs yet"
    folder = write_pairs(round_, PAIRS)
    right = {"pair": id_of(PAIRS[0]), "answer": "a", "annotator": "ada"}
    assert signed_in.post(f"/labels/{round_}/answer", data=right).status_code == 400, "of nobody"
    signed_in.cookies.set("annotator", b"ada".hex())
    for wrong in ({"answer": "left"}, {"pair": "0" * 20}, {"answer": ""}):
        assert signed_in.post(f"/labels/{round_}/answer", data=right | wrong).status_code == 400, wrong
    for name in ("", "x" * 65, "a\x1bb"):
        assert signed_in.post(f"/labels/{round_}/annotator", data={"annotator": name}).status_code == 400
    assert not (folder / "answers.jsonl").exists()
    model = make("sft")
    assert signed_in.get(f"/labels/{model}").status_code == 400
    assert signed_in.get("/labels/scores@sha256:" + "0" * 64).status_code == 404


def test_text_of_others_stays_text(signed_in: TestClient, round_: Reference) -> None:
    tools = [{"type": "function", "function": {"name": HOSTILE}}]
    prompt = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "x"}]
    row = {"prompt": prompt, "a": HOSTILE, "b": "x" * 1_000_000, "source": "s", "tools": tools}
    write_pairs(round_, [row])
    signed_in.cookies.set("annotator", HOSTILE[:60].encode().hex())
    for path in (f"/labels/{round_}", f"/labels/{round_}/results", "/labels"):
        text = signed_in.get(path).text
        assert "<script>alert" not in text
        assert "<img" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
        assert len(text) < 200_000


def test_inboxes_of_nightly_runs_are_proposed(
    signed_in: TestClient, round_: Reference, store: Store, tmp_path: Path
) -> None:
    write_pairs(round_, PAIRS)
    (tmp_path / "in").mkdir()
    recipe = {"method": "nightly", "dpo": {"data": [{"path": f"{tmp_path}/in/**/*.jsonl"}, {"path": "store:x"}]}}
    with Journal(new_record("0eb1c584-1111", "nightly", recipe, store.uri)).open():
        pass
    assert f"<option>{tmp_path}/in</option>" in signed_in.get(f"/labels/{round_}/results").text
