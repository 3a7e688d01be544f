"""Promotion and rollback: conditions for moving a tag, and the target of repeated rollbacks."""

from __future__ import annotations

import socket

import pytest

from alignment_core.artifacts import Reference, prune
from alignment_core.artifacts.paths import blob_path
from alignment_core.artifacts.promotion import promote, rollback
from alignment_core.errors import NotFound, StoreError, UserError

TAG = "policy/production"


@pytest.fixture
def models(store, write):
    """Four models, A to D."""
    return {name: store.publish(write(name, {"weights": name}), "model") for name in "ABCD"}


@pytest.fixture
def moved(store, models):
    """``moved("ABC")`` promotes these in turn."""

    def move(names: str) -> None:
        for name in names:
            promote(store, TAG, models[name], store.tags.get(TAG), f"promote {name}")

    return move


def names(store, models) -> str:
    """The artifacts that the tag pointed to, move by move."""
    by_reference = {reference: name for name, reference in models.items()}
    return "".join(by_reference[move.to] for move in store.tags.history(TAG))


def test_two_rollbacks_in_a_row_go_two_back_and_do_not_toggle(store, models, moved):
    moved("ABC")
    assert rollback(store, TAG).to == models["B"]
    assert rollback(store, TAG).to == models["A"]
    with pytest.raises(UserError, match="pointed to nothing before"):
        rollback(store, TAG)
    assert names(store, models) == "ABCBA"
    assert [move.number for move in store.tags.history(TAG)] == [1, 2, 3, 4, 5]


def test_rollback_after_a_later_promotion_skips_the_move_that_was_rolled_back(store, models, moved):
    moved("ABC")
    rollback(store, TAG)
    moved("D")
    assert [rollback(store, TAG).to for _ in range(2)] == [models["B"], models["A"]]  # C was left on purpose


def test_the_history_says_who_moved_the_tag(store, models, moved, monkeypatch):
    monkeypatch.setenv("LOGNAME", "ada")
    moved("AB")
    assert rollback(store, TAG).by == f"ada on {socket.gethostname()}"
    assert {move.by for move in store.tags.history(TAG)} == {f"ada on {socket.gethostname()}"}


def test_an_older_model_that_is_promoted_again_is_no_rollback(store, models, moved):
    moved("ABA")
    assert [rollback(store, TAG).to for _ in range(2)] == [models["B"], models["A"]]


def test_a_move_to_the_same_artifact_is_stepped_over(store, models, moved):
    moved("AB")
    store.tags.move(TAG, models["B"], models["B"], "evaluated again")
    assert rollback(store, TAG).to == models["A"]


def test_rollback_to_a_move_counts_from_there(store, models, moved):
    moved("ABCD")
    assert (
        rollback(store, TAG, 2, "the last that users liked").reason
        == "rolled back to move 2: the last that users liked"
    )
    assert rollback(store, TAG).to == models["A"]
    assert rollback(store, TAG, 5).back_to == 2  # move 5 was itself a way back to move 2
    with pytest.raises(UserError, match="has no move 9: its history has the moves 1 to 7"):
        rollback(store, TAG, 9)
    with pytest.raises(UserError, match="as the tag does now"):
        rollback(store, TAG, 2)


def test_an_unknown_tag_and_an_unknown_artifact_are_not_found(store, models):
    with pytest.raises(NotFound, match="no tag policy/production"):
        rollback(store, TAG)
    with pytest.raises(NotFound):
        promote(store, TAG, Reference("model", "0" * 64), None, "")


def test_a_damaged_artifact_is_never_named_anew(store, models, moved):
    moved("AB")
    blob = store.backend.root / blob_path(store.manifest(models["A"]).files[0].sha256)
    blob.chmod(0o644)
    blob.write_text("a")
    for attempt in (lambda: rollback(store, TAG), lambda: promote(store, TAG, models["A"], models["B"], "")):
        with pytest.raises(StoreError, match="is damaged, so the tag was not moved"):
            attempt()
    assert store.tags.get(TAG) == models["B"]


def test_a_pruned_artifact_is_refused(store, write, draft):
    rollouts = store.publish(write("r"), "rollouts", draft())
    assert prune(store, None, 0, delete=True)
    with pytest.raises(NotFound, match="were pruned"):
        promote(store, "samples", rollouts, None, "")


def test_concurrent_rollbacks_append_a_linear_history(store, models, moved, in_children):
    moved("ABC")

    codes = in_children(*[lambda: rollback(store, TAG)] * 4)
    history = store.tags.history(TAG)
    assert names(store, models) in ("ABCB", "ABCBA")  # a later rollback may start from the result of the first
    assert [move.number for move in history] == list(range(1, len(history) + 1))
    assert codes.count(0) == len(history) - 3
