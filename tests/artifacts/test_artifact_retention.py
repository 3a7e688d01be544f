"""Retention: which bytes are deleted, which metadata stays, and robustness to crashes and concurrent processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from alignment_core.artifacts import collect, open_store, prune
from alignment_core.artifacts.paths import BLOBS, MANIFESTS, USES, blob_path, manifest_path, tag_path
from alignment_core.artifacts.promotion import rollback
from alignment_core.artifacts.reference import MASTERS
from alignment_core.artifacts.uses import note_use
from alignment_core.errors import Corrupt, NotFound, UserError
from alignment_core.lineage import Graph
from alignment_core.models.masters import masters_of, name_masters
from tests.artifacts.conftest import age, is_whole
from tests.processes import kill_at

KEY, OTHER_KEY = "a" * 64, "b" * 64
CHANGES = ("fsync", "link", "rename", "unlink", "utime")
ROWS = {"part-0.parquet": "many", "part-1.parquet": "completions"}


@pytest.fixture
def rollouts(store, write, draft):
    reference = store.publish(write("rollouts", ROWS), "rollouts", draft(stage="generate"))
    store.fetch(reference)
    age(store, 2)
    return reference


def test_pruning_deletes_the_bytes_of_old_rollouts_and_keeps_the_manifest(store, write, draft, rollouts):
    pairs = store.publish(write("pairs", {"rows": "pairs"}), "dataset", draft(OTHER_KEY, inputs={"samples": rollouts}))
    size = store.manifest(rollouts).size
    (garbage,) = prune(store, None, 1)
    assert (garbage.what, garbage.path, garbage.size) == ("rollouts", str(rollouts), size)
    assert is_whole(store, rollouts)

    assert prune(store, None, 1, delete=True) == [garbage]
    assert store.is_pruned(rollouts)
    assert store.verify(rollouts) == []
    assert not any(store.backend.stat(blob_path(entry.sha256)) for entry in store.manifest(rollouts).files)
    assert not (store.workspace.cache / rollouts.digest).exists()
    with pytest.raises(NotFound, match=r"the bytes of rollouts@sha256:\w+ were pruned"):
        store.fetch(rollouts)
    with Graph.of(store) as graph:
        assert [used for _, used in graph.parents(pairs)] == [rollouts]
    assert store.records.find(OTHER_KEY).output == pairs
    assert prune(store, None, 1, delete=True) == []


def test_rerunning_the_stage_of_pruned_rollouts_restores_them(store, write, draft, rollouts, caplog):
    prune(store, None, 1, delete=True)
    with caplog.at_level("INFO"):
        assert store.records.find(KEY) is None
    assert f"{rollouts.short} was pruned" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]  # it was pruned on purpose
    assert store.publish(write("rollouts", ROWS), "rollouts", draft()) == rollouts
    assert not store.is_pruned(rollouts)
    assert store.records.find(KEY).output == rollouts
    assert (store.fetch(rollouts) / "part-0.parquet").read_text() == "many"


def test_young_tagged_and_other_kinds_of_artifacts_are_not_pruned(store, write, rollouts):
    tagged = store.publish(write("tagged", {"rows": "t"}), "scores")
    store.tags.move("scores/now", tagged, None, "to be looked at")
    model = store.publish(write("model"), "model")
    age(store, 2)
    young = store.publish(write("young", {"rows": "y"}), "scores")
    assert [garbage.path for garbage in prune(store, None, 1, delete=True)] == [str(rollouts)]
    assert all(is_whole(store, reference) and not store.is_pruned(reference) for reference in (tagged, model, young))
    assert prune(store, None, None, delete=True) == []


def test_blobs_of_other_artifacts_are_kept(store, write):
    rollouts = store.publish(write("rollouts", ROWS), "rollouts")
    copy = store.publish(write("copy", {"rows": ROWS["part-1.parquet"], "note": "mine"}), "dataset")
    age(store, 2)
    (gone,) = prune(store, None, 1, delete=True)
    assert gone.size == len(ROWS["part-0.parquet"])
    assert store.is_pruned(rollouts)
    assert is_whole(store, copy)


def test_rollouts_that_a_run_finds_again_count_as_used(store, rollouts):
    assert store.records.find(KEY) is not None
    assert prune(store, None, 1, delete=True) == []
    age(store, 2)
    assert len(prune(store, None, 1, delete=True)) == 1


def test_gc_keeps_manifests_of_pruned_artifacts_and_deletes_marks_of_deleted_artifacts(store, write, draft, rollouts):
    orphan = store.publish(write("orphan", {"rows": "o"}), "scores")  # no record, so that gc takes it altogether
    age(store, 2)
    prune(store, None, 1, delete=True)
    report = collect(store, delete=True, older_than=-1)
    assert report.of("mark") == [f"pruned/{orphan.digest}"]
    assert [manifest.reference for manifest in store.artifacts()] == [rollouts]
    assert store.is_pruned(rollouts)


# ------------------------------------------------------------------ master weights


def policy_with_masters(store, write, draft, name, key):
    model, masters = write(f"{name}-model", {"w": name}), write(name, {"m": name})
    name_masters(model, masters)
    return store.publish_outputs({"model": (model, "model"), MASTERS: (masters, MASTERS)}, draft(key))


def test_master_weights_are_pruned_unless_a_tag_points_to_their_policy_or_would_after_a_rollback(store, write, draft):
    old, previous, now, untagged = (
        policy_with_masters(store, write, draft, name, key * 64)
        for name, key in (("old", "a"), ("previous", "b"), ("now", "d"), ("untagged", "c"))
    )
    store.tags.move("policy/production", old["model"], None, "a night")
    store.tags.move("policy/production", previous["model"], old["model"], "the next night")
    store.tags.move("policy/production", now["model"], previous["model"], "the night after")
    age(store, 2)
    assert prune(store, None, 1, delete=True) == [], "rollouts_days is of other kinds"
    gone = {str(of[MASTERS]) for of in (old, untagged)}
    assert {garbage.path for garbage in prune(store, None, None, delete=True, masters_days=1)} == gone
    assert rollback(store, "policy/production").to == previous["model"]
    assert all(is_whole(store, of[MASTERS]) for of in (previous, now))
    assert all(is_whole(store, of["model"]) for of in (old, previous, now, untagged))
    assert store.records.find("c" * 64) is not None, "the stage does not run again for them"
    assert store.records.find("c" * 64, needs=(MASTERS,)) is None


def test_master_weights_are_kept_for_a_tagged_policy_of_another_stage_that_names_them(store, write, draft):
    """Such as a stage of the user's that gave the policy another chat template; its record has no master weights."""
    policy = policy_with_masters(store, write, draft, "policy", "a" * 64)
    pointer = (store.fetch(policy["model"]) / "masters.json").read_text()
    changed = write("changed", {"w": "policy", "chat_template.jinja": "{{ messages }}", "masters.json": pointer})
    store.tags.move("policy/production", store.publish(changed, "model", draft("b" * 64)), None, "by hand")
    age(store, 2)
    assert prune(store, None, None, delete=True, masters_days=1) == []


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"masters": 7}', '{"masters": "masters@sha256:1"}'])
def test_a_tagged_policy_that_names_no_master_weights_stops_no_pruning_and_cannot_be_trained(
    content, store, write, draft, rollouts
):
    policy = store.publish(write("odd", {"w": "odd", "masters.json": content}), "model", draft(OTHER_KEY))
    store.tags.move("policy/production", policy, None, "by hand")
    age(store, 2)
    assert [garbage.what for garbage in prune(store, None, 1, delete=True, masters_days=1)] == ["rollouts"]
    with pytest.raises(UserError, match=r"masters\.json names no master weights"):
        masters_of(store.fetch(policy))


def test_a_damaged_tagged_policy_is_named_before_anything_is_pruned(store, write, draft):
    policy = policy_with_masters(store, write, draft, "policy", "a" * 64)
    store.tags.move("policy/production", policy["model"], None, "a night")
    age(store, 2)
    (entry,) = (entry for entry in store.manifest(policy["model"]).files if entry.path == "masters.json")
    blob = store.workspace.root / blob_path(entry.sha256)
    blob.unlink()
    blob.write_text("x" * entry.size)
    with pytest.raises(Corrupt, match=rf"masters\.json of {policy['model'].short}"):
        prune(store, None, None, delete=True, masters_days=1)
    assert is_whole(store, policy[MASTERS])


def test_after_a_rollback_and_without_the_file_of_a_move_the_next_target_keeps_its_master_weights(store, write, draft):
    policies = [policy_with_masters(store, write, draft, key, key * 64) for key in "abcd"]
    for before, after in zip([None, *policies], policies, strict=False):
        store.tags.move("policy/production", after["model"], before and before["model"], "a night")
    assert rollback(store, "policy/production").to == policies[2]["model"]
    store.backend.delete(tag_path("policy/production", 2))
    age(store, 2)
    pruned = {garbage.path for garbage in prune(store, None, None, delete=True, masters_days=1)}
    assert pruned == {str(policies[number][MASTERS]) for number in (1, 3)}
    assert rollback(store, "policy/production").to == policies[0]["model"]


def test_master_weights_that_were_used_lately_are_kept_and_gc_keeps_those_of_a_record(store, write, draft):
    policy = policy_with_masters(store, write, draft, "policy", "a" * 64)
    age(store, 2)
    note_use(store.backend, policy[MASTERS])
    assert prune(store, None, None, delete=True, masters_days=1) == []
    collect(store, delete=True, older_than=-1)
    assert is_whole(store, policy[MASTERS])


# ------------------------------------------------------------------ progress


def test_old_progress_is_pruned_unless_claimed_or_fresh(store):
    for key in (KEY, OTHER_KEY, "c" * 64):
        with store.workspace.claim(key) as progress:
            (progress / "step-00000001").mkdir()
            (progress / "step-00000001" / "state").write_text("weights")
    for key in (KEY, OTHER_KEY):
        tree = store.workspace.all_progress / key
        for path in (tree, *tree.rglob("*")):
            os.utime(path, (0, 0))
    with store.workspace.claim(OTHER_KEY) as progress:
        for path in (progress, *progress.rglob("*")):
            os.utime(path, (0, 0))  # nothing was written for years, but its stage runs
        assert [garbage.path for garbage in prune(store, 7, None)] == [f"progress/{KEY}"]
        assert len(prune(store, 7, None, delete=True)) == 1
        assert (progress / "step-00000001" / "state").exists()
    assert not (store.workspace.all_progress / KEY).exists()
    assert (store.workspace.all_progress / ("c" * 64)).exists()
    assert [garbage.path for garbage in prune(store, 7, None, delete=True)] == [f"progress/{OTHER_KEY}"]


def test_a_clock_that_jumps_prunes_nothing_that_a_live_run_works_with(store, rollouts, monkeypatch):
    (store.workspace.progress(OTHER_KEY) / "step-00000001").mkdir()
    with store.workspace.claim(OTHER_KEY):
        pass  # the stage's turn has not come again yet
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 8 * 86400)
    assert prune(store, 7, 7, delete=True, used={OTHER_KEY, str(rollouts)}) == []
    assert {garbage.what for garbage in prune(store, 7, 7)} == {"progress"}, "ages are measured by the store's clock"


# ------------------------------------------------------------------ crashes and other processes


def test_a_killed_pruner_leaves_an_artifact_whole_or_marked(tmp_path, write, draft, in_children):
    directory = write("rollouts", ROWS)
    halves = 0
    for step in range(1, 100):
        store = open_store(tmp_path / f"store-{step}")
        rollouts = store.publish(directory, "rollouts", draft())
        age(store, 2)

        def prunes(step=step, store=store):
            kill_at(step, CHANGES)
            prune(store, None, 1, delete=True)

        (code,) = in_children(prunes)
        assert code in (0, -signal.SIGKILL)
        assert store.is_pruned(rollouts) or is_whole(store, rollouts)
        assert store.verify(rollouts) == []
        assert (store.records.find(KEY) is None) == store.is_pruned(rollouts)
        halves += store.is_pruned(rollouts) and any(
            store.backend.stat(blob_path(entry.sha256)) for entry in store.manifest(rollouts).files
        )
        age(store, 2)
        prune(store, None, 1, delete=True)  # the next one finishes
        assert not any(store.backend.list(BLOBS))
        assert store.publish(directory, "rollouts", draft()) == rollouts
        assert store.records.find(KEY) is not None
        if code == 0:
            break
    assert code == 0
    assert halves > 1  # the deletion was cut at several points


def test_a_killed_publisher_of_pruned_rollouts_leaves_an_artifact_marked_or_whole(tmp_path, write, draft, in_children):
    directory = write("rollouts", ROWS)
    for step in range(1, 100):
        store = open_store(tmp_path / f"store-{step}")
        rollouts = store.publish(directory, "rollouts", draft())
        age(store, 2)
        prune(store, None, 1, delete=True)

        def publish(step=step, store=store):
            kill_at(step, CHANGES)
            store.publish(directory, "rollouts", draft())

        (code,) = in_children(publish)
        assert store.is_pruned(rollouts) or is_whole(store, rollouts)
        if code == 0:
            break
    assert code == 0
    assert not store.is_pruned(rollouts)


def test_concurrent_pruners_delete_nothing_that_a_publisher_returned(store, write, draft, in_children, tmp_path):
    directory = write("rollouts", ROWS)
    rollouts = store.publish(directory, "rollouts", draft())
    end, seen = time.time() + 2, {name: tmp_path / name for name in ("found", "pruned")}

    def continues() -> bool:
        """For two seconds, and on a busy machine until a publisher has found and a pruner has taken something."""
        late = time.time() - end
        return late < 0 or (late < 60 and not all(path.exists() for path in seen.values()))

    def publish() -> None:
        mine = open_store(store.uri)
        while continues():
            for prefix in (BLOBS, MANIFESTS, USES):
                for stored in mine.backend.list(prefix):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(mine.backend.root / stored.path, (0, 0))  # type: ignore[attr-defined]  # now a pruner may take it
            mine.publish(directory, "rollouts", draft())
            if mine.records.find(KEY) is not None:
                seen["found"].touch()
                assert is_whole(mine, rollouts)

    def prunes() -> None:
        mine = open_store(store.uri)
        while continues():
            if prune(mine, None, 1, delete=True):
                seen["pruned"].touch()

    assert in_children(publish, prunes, prunes) == [0, 0, 0]
    assert all(path.exists() for path in seen.values())
    assert store.is_pruned(rollouts) or is_whole(store, rollouts)


def test_a_user_of_rollouts_and_a_pruner_notice_each_other(store, rollouts, monkeypatch):
    # The pruner marks first and checks the time afterwards; here a run finds the artifact between these steps.
    stat, path = store.backend.stat, manifest_path(rollouts.digest)

    def found_meanwhile(requested):
        if requested == path and store.is_pruned(rollouts):
            monkeypatch.undo()
            assert store.records.find(KEY) is None  # it sees the mark, and its stage runs again
        return stat(requested)

    monkeypatch.setattr(store.backend, "stat", found_meanwhile)
    prune(store, None, 1, delete=True)
    assert is_whole(store, rollouts)  # and the pruner sees the new use
