"""Artifacts between stores: whole or not at all, nothing sent twice, and with the provenance that makes them findable."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from alignment_core.artifacts import ProvenanceDraft, Reference, Store, collect, open_store, prune
from alignment_core.artifacts.attachments import attach, attachments
from alignment_core.artifacts.reference import MASTERS
from alignment_core.artifacts.transfer import copy, plan
from alignment_core.errors import NotFound, UserError
from alignment_core.lineage import Graph
from alignment_core.models.masters import name_masters
from tests.align import align_here
from tests.artifacts.conftest import age
from tests.processes import ended, in_child

KEYS = {"data": "1" * 64, "sft": "2" * 64, "rl": "3" * 64}


@pytest.fixture
def target(bucket: str, tmp_path: Path, home: Path) -> Store:
    return open_store(f"s3://{bucket}/{tmp_path.name}")


@pytest.fixture
def references(store: Store, write: Callable[..., Path]) -> dict[str, Reference]:
    """A data set, a model trained on it, and the results of reinforcement learning: a policy and trajectories."""

    def draft(stage: str, **inputs: Reference) -> ProvenanceDraft:
        return ProvenanceDraft(key=KEYS[stage], stage=stage, label=stage, inputs=inputs)

    data = store.publish(write("data", {"train.parquet": "rows"}), "dataset", draft("data"))
    sft = store.publish(write("sft", {"weights": "w" * 100, "config.json": "{}"}), "model", draft("sft", data=data))
    outputs = {
        "policy": (write("policy", {"weights": "v" * 100, "config.json": "{}"}), "model"),
        "trajectories": (write("trajectories", {"step-1": "t" * 50}), "trajectories"),
    }
    return {"data": data, "sft": sft, **store.publish_outputs(outputs, draft("rl", policy=sft))}


def test_an_artifact_comes_with_its_provenance_and_a_second_time_nothing_is_sent(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    copy_plan = plan(store, target, references["sft"], ancestors=False)
    copied = copy(store, target, copy_plan)
    assert (copied.artifacts, copied.sent, copied.kept, copied.records) == ((references["sft"],), 2, 0, 1)
    assert target.verify(references["sft"]) == []
    record = target.records.find(KEYS["sft"])
    assert record is not None
    assert record.inputs == {"data": references["data"]}
    with pytest.raises(NotFound):
        target.manifest(references["data"])
    again = copy(store, target, plan(store, target, references["sft"], ancestors=False))
    assert (again.sent, again.kept) == (0, 2)
    policy = copy(store, target, plan(store, target, references["policy"], ancestors=False))
    assert (policy.sent, policy.kept) == (1, 1), "files that it shares with another artifact are there"


def test_a_copy_with_ancestors_has_the_whole_lineage(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    copied = copy(store, target, plan(store, target, references["policy"], ancestors=True))
    assert set(copied.artifacts) == {references["policy"], references["sft"], references["data"]}
    with Graph.of(target) as graph:
        assert graph.descends(references["policy"], references["data"])
    assert target.verify(references["data"]) == target.verify(references["sft"]) == []


def test_outputs_left_out_of_a_copy_are_marked_as_pruned_and_can_be_copied_later(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    copy(store, target, plan(store, target, references["policy"], ancestors=False))
    assert target.records.find(KEYS["rl"]) is not None
    assert target.records.find(KEYS["rl"], needs=["trajectories"]) is None
    assert target.is_pruned(references["trajectories"])
    copy(store, target, plan(store, target, references["trajectories"], ancestors=False))
    assert target.records.find(KEYS["rl"], needs=["trajectories"]) is not None
    assert not target.is_pruned(references["policy"])


@pytest.mark.parametrize("is_pruned", [False, True])
def test_the_master_weights_of_a_policy_are_copied_with_it_unless_they_were_pruned(
    store: Store, target: Store, write: Callable[..., Path], is_pruned: bool
) -> None:
    model, masters = write("in-bf16", {"weights": "w" * 100}), write(MASTERS, {"weights": "m" * 200})
    name_masters(model, masters)
    last = write("last", {"weights": "l" * 100})
    outputs = {"model": (model, "model"), "last": (last, "model"), MASTERS: (masters, MASTERS)}
    policy = store.publish_outputs(outputs, ProvenanceDraft(key="5" * 64, stage="dpo", label="dpo"))
    copied = copy(store, target, plan(store, target, policy["last"], ancestors=False))
    assert copied.artifacts == (policy["last"],), "it has no master weights"
    if is_pruned:
        age(store, 2)
        assert prune(store, None, None, delete=True, masters_days=1)
    copied = copy(store, target, plan(store, target, policy["model"], ancestors=False))
    assert copied.artifacts == ((policy["model"],) if is_pruned else (policy["model"], policy[MASTERS]))
    assert target.is_pruned(policy[MASTERS]) == is_pruned
    assert target.verify(policy[MASTERS]) == []
    assert (target.records.find("5" * 64, needs=[MASTERS]) is None) == is_pruned


def test_a_policy_of_another_stage_takes_the_master_weights_that_it_names_along_and_the_collector_keeps_them(
    store: Store, target: Store, write: Callable[..., Path]
) -> None:
    model, masters = write("in-bf16", {"weights": "w" * 100}), write(MASTERS, {"weights": "m" * 200})
    name_masters(model, masters)
    trained = store.publish_outputs(
        {"model": (model, "model"), MASTERS: (masters, MASTERS)},
        ProvenanceDraft(key="5" * 64, stage="dpo", label="dpo"),
    )
    (model / "chat_template.jinja").write_text("{{ messages }}")
    changed = store.publish(model, "model", ProvenanceDraft(key="6" * 64, stage="template", label="template"))
    copied = copy(store, target, plan(store, target, changed, ancestors=False))
    assert copied.artifacts == (changed, trained[MASTERS])
    collect(target, delete=True, older_than=-1)
    assert target.verify(trained[MASTERS]) == []
    assert not target.is_pruned(trained[MASTERS])
    assert target.is_pruned(trained["model"])


def test_a_pruned_artifact_is_copied_as_a_mark_among_ancestors_and_refused_alone(
    store: Store, target: Store, references: dict[str, Reference], write: Callable[..., Path]
) -> None:
    draft = ProvenanceDraft(key="4" * 64, stage="pairs", label="pairs", inputs={"rollouts": references["trajectories"]})
    pairs = store.publish(write("pairs", {"train.parquet": "pairs"}), "dataset", draft)
    age(store, 2)
    assert prune(store, None, 1, delete=True)
    with pytest.raises(NotFound, match="were pruned"):
        plan(store, target, references["trajectories"], ancestors=False)
    copied = copy(store, target, plan(store, target, pairs, ancestors=True))
    assert references["trajectories"] in copied.artifacts
    assert target.is_pruned(references["trajectories"])
    with Graph.of(target) as graph:
        assert graph.descends(pairs, references["data"])


def test_a_killed_copy_leaves_no_visible_part_and_the_next_continues(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    seen = []

    def dies(entry: object) -> None:
        seen.append(entry)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        copy(store, open_store(target.uri), plan(store, target, references["policy"], ancestors=True), dies)

    assert ended(in_child(work)) == -signal.SIGKILL
    assert list(target.artifacts()) == []
    assert target.records.find(KEYS["rl"]) is None
    copied = copy(store, target, plan(store, target, references["policy"], ancestors=True))
    assert copied.kept >= 2
    assert target.verify(references["policy"]) == []
    assert collect(target, delete=True, older_than=-1).of("manifest") == []


def test_a_damaged_source_is_found_before_the_target_has_a_record(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    entry = store.manifest(references["sft"]).files[1]
    blob = next(path for path in Path(store.uri).rglob(entry.sha256))
    blob.chmod(0o644)
    blob.write_bytes(b"x" * entry.size)
    with pytest.raises(Exception, match="has the digest"):
        copy(store, target, plan(store, target, references["sft"], ancestors=False))
    assert target.records.find(KEYS["sft"]) is None
    assert list(target.artifacts()) == []


def test_a_store_is_not_copied_onto_itself(store: Store, references: dict[str, Reference]) -> None:
    with pytest.raises(UserError, match="both the source and the target"):
        plan(store, open_store(store.uri), references["sft"], ancestors=False)


def test_a_copy_marks_no_whole_artifact_of_the_target_as_pruned(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    copy(store, target, plan(store, target, references["trajectories"], ancestors=False))
    age(store, 2)
    assert prune(store, None, 1, delete=True)
    copy(store, target, plan(store, target, references["policy"], ancestors=False))
    assert not target.is_pruned(references["trajectories"])
    assert target.records.find(KEYS["rl"], needs=["trajectories"]) is not None


def test_an_artifact_copied_without_ancestors_can_be_copied_on_with_ancestors(
    store: Store, target: Store, references: dict[str, Reference], tmp_path: Path
) -> None:
    copy(store, target, plan(store, target, references["sft"], ancestors=False))
    third = open_store(tmp_path / "third")
    assert copy(target, third, plan(target, third, references["sft"], ancestors=True)).artifacts == (references["sft"],)


def test_attachments_are_copied_with_an_artifact_and_replace_none(
    store: Store, target: Store, references: dict[str, Reference]
) -> None:
    attach(store, references["sft"], {"bom": b"1"})
    copy(store, target, plan(store, target, references["sft"], ancestors=False))
    attach(store, references["sft"], {"bom": b"2", "signature": b"3"})
    copy(store, target, plan(store, target, references["sft"], ancestors=False))
    assert attachments(target, references["sft"]) == {"bom": b"1", "signature": b"3"}


def test_the_commands_push_pull_and_copy(
    store: Store, target: Store, references: dict[str, Reference], tmp_path: Path, home: Path
) -> None:
    store.tags.move("policy/production", references["policy"], None, "first")
    pushed = json.loads(
        align_here(
            home, "artifacts", "push", "policy/production", "--to", target.uri, "--store", store.uri, "--json"
        ).stdout
    )
    assert pushed["artifacts"] == [str(references["policy"])]
    assert (pushed["sent"], pushed["to"]) == (2, target.uri)
    third = tmp_path / "third"
    pulled = align_here(
        home, "artifacts", "pull", references["policy"].digest[:8], "--from", target.uri, "--store", str(third)
    )
    assert pulled.returncode == 0
    assert f"{references['policy']}: in {third} (2 files sent, 0.0 MiB; 0 were there)" in pulled.stdout
    copied = align_here(
        home,
        "artifacts",
        "copy",
        str(references["sft"]),
        "--from",
        store.uri,
        "--to",
        str(third),
        "--ancestors",
        "--json",
    )
    assert set(json.loads(copied.stdout)["artifacts"]) == {str(references["sft"]), str(references["data"])}
    unknown = align_here(home, "artifacts", "push", "policy/none", "--to", str(third), "--store", store.uri, "--json")
    assert unknown.returncode == 2
