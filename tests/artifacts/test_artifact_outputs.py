"""Several outputs of one stage: finished together or not at all, kept apart, and one of them may go without the others."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from alignment_core.artifacts import Reference, open_store
from alignment_core.artifacts.gc import collect
from alignment_core.artifacts.paths import blob_path, stage_path
from alignment_core.artifacts.retention import prune
from alignment_core.errors import UserError
from alignment_core.lineage import Graph, Tree, text_tree, to_json
from tests.artifacts.conftest import age, is_whole
from tests.matrix import matrix
from tests.processes import kill_at

KEY, OTHER_KEY = "a" * 64, "b" * 64


@pytest.fixture
def outputs(write):
    """A policy and its best state, which are the same weights, and the samples that it learnt from."""
    weights = {"config.json": "{}", "model": "weights"}
    return {
        "policy": (write("policy", weights), "model"),
        "best": (write("best", weights), "model"),
        "trajectories": (write("trajectories", {"step-0": "a b", "step-1": "a c"}), "trajectories"),
    }


# ------------------------------------------------------------------ one record


@pytest.mark.slow
@pytest.mark.parametrize("from_scratch", matrix([False, True], usual=[False]))
def test_killed_publisher_leaves_all_outputs_finished_or_none_visible_after_a_collection(
    from_scratch, tmp_path, outputs, draft, in_children
):
    whole = open_store(tmp_path / "whole").publish_outputs(outputs, draft())
    visible_without_record = 0
    for step in range(1, 200):
        uri = tmp_path / f"store-{step}"
        store = open_store(uri)

        def publish(step=step, store=store):
            with store.workspace.scratch() as scratch:
                written = {
                    name: (shutil.copytree(folder, scratch / name) if from_scratch else folder, kind)
                    for name, (folder, kind) in outputs.items()
                }
                kill_at(step)
                store.publish_outputs(written, draft())

        (code,) = in_children(publish)
        reader = open_store(uri)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        record = reader.records.find(KEY)
        visible = [manifest.reference for manifest in reader.artifacts()]
        assert all(reader.verify(reference) == [] for reference in visible)
        visible_without_record += bool(visible) and record is None
        collect(reader, delete=True, older_than=-1)
        if record is None:
            assert [entry.path for entry in reader.backend.list("") if entry.path not in ("format.json", "lock")] == []
        else:
            assert record.outputs == whole
            assert all(reader.verify(reference) == [] for reference in whole.values())
        assert reader.publish_outputs(outputs, draft()) == whole
        assert reader.records.find(KEY).outputs == whole
    assert code == 0
    assert visible_without_record > 3, "it was killed between the outputs and the record, too"


def test_outputs_of_the_same_bytes_are_one_artifact_under_two_names(store, outputs, draft):
    published = store.publish_outputs(outputs, draft(stage="rl", label="rl"))
    assert list(published) == ["policy", "best", "trajectories"]
    assert published["policy"] == published["best"]
    assert {manifest.reference for manifest in store.artifacts()} == set(published.values())
    (record,) = store.records.makers(published["best"])
    assert record.output == published["policy"], "the first name is the default output"
    assert record.labels_of(published["best"]) == ["rl (policy)", "rl (best)"]
    assert collect(store, delete=True, older_than=-1).garbage == ()

    other = store.publish(outputs["best"][0], "critic")
    assert other.digest != published["best"].digest, "the kind is part of an artifact's identity"
    assert store.manifest(other).files == store.manifest(published["best"]).files


def test_the_first_whole_result_of_a_key_stands_with_all_of_its_outputs(store, outputs, draft, write):
    published = store.publish_outputs(outputs, draft())
    others = {**outputs, "trajectories": (write("others", {"step-0": "x"}), "trajectories")}
    assert store.publish_outputs(others, draft()) == published
    assert store.records.find(KEY).outputs == published


# ------------------------------------------------------------------ retention of one output


def test_pruned_trajectories_invalidate_a_record_only_if_needed(store, outputs, draft, caplog):
    published = store.publish_outputs(outputs, draft())
    age(store, 2)
    (gone,) = prune(store, None, 1, delete=True)
    assert (gone.what, gone.path) == ("trajectories", str(published["trajectories"]))
    assert is_whole(store, published["policy"])
    assert store.records.find(KEY).outputs == published
    with caplog.at_level("INFO"):
        assert store.records.find(KEY, needs=["trajectories"]) is None
    assert f"{published['trajectories'].short} was pruned" in caplog.text

    assert store.publish_outputs(outputs, draft()) == published  # it ran again
    assert store.records.find(KEY, needs=["trajectories"]).outputs == published


def test_a_stage_that_runs_again_for_its_trajectories_and_makes_others_replaces_its_record(
    store, outputs, draft, write
):
    published = store.publish_outputs(outputs, draft())
    age(store, 2)
    prune(store, None, 1, delete=True)
    others = {**outputs, "trajectories": (write("others", {"step-0": "x"}), "trajectories")}
    again = store.publish_outputs(others, draft())
    assert again["policy"] == published["policy"]
    assert again["trajectories"] != published["trajectories"]
    assert store.records.find(KEY, needs=["trajectories"]).outputs == again


def test_only_a_lookup_that_needs_trajectories_marks_them_as_used(store, outputs, draft):
    store.publish_outputs(outputs, draft())
    age(store, 2)
    assert store.records.find(KEY, needs=["trajectories"]) is not None
    assert prune(store, None, 1) == []
    age(store, 2)
    assert store.records.find(KEY) is not None
    assert len(prune(store, None, 1)) == 1


def test_damaged_trajectories_are_no_reason_to_train_again_and_damaged_weights_are(store, outputs, draft):
    published = store.publish_outputs(outputs, draft())

    def lose(reference: Reference) -> None:
        (store.backend.root / blob_path(store.manifest(reference).files[-1].sha256)).unlink()

    lose(published["trajectories"])
    assert store.records.find(KEY) is not None
    assert store.records.find(KEY, needs=["trajectories"]) is None
    lose(published["best"])
    assert store.records.find(KEY) is None


def test_progress_of_a_stage_that_has_to_make_dropped_trajectories_again_is_no_garbage(store, outputs, draft):
    store.publish_outputs(outputs, draft())
    age(store, 2)
    prune(store, None, 1, delete=True)
    (store.workspace.progress(KEY) / "step-1").write_text("half of it")
    assert collect(store, older_than=-1).of("progress") == []
    store.publish_outputs(outputs, draft())
    assert collect(store, older_than=-1).of("progress") == [f"progress/{KEY}"]


# ------------------------------------------------------------------ lineage


def test_lineage_names_the_output_that_was_used(store, outputs, draft, write):
    outputs["best"] = (write("better", {"model": "better"}), "model")
    start = store.publish(write("start", {"model": "start"}), "model")
    published = store.publish_outputs(outputs, draft(stage="rl", label="rl", inputs={"policy": start}))
    scores = store.publish(
        write("scores"), "scores", draft(OTHER_KEY, label="score", inputs={"policy": published["best"]})
    )

    with Graph.of(store) as graph:
        assert graph.descends(scores, start)
        assert "by rl (rl), output best, seed" in text_tree(Tree(graph, scores, upward=True))
        _, policy, _ = to_json(Tree(graph, scores, upward=True))["artifacts"]
        assert (policy["reference"], policy["made_by"][0]["as"]) == (str(published["best"]), ["best"])

        down = text_tree(Tree(graph, start, upward=False))
        assert [f"output {name}, seed" in down for name in published] == [True] * 3
        assert down.count("code unknown") == 2, "a stage is described once, not once for each output"


# ------------------------------------------------------------------ records of earlier versions


def test_a_record_of_an_earlier_version_has_one_output_by_the_name_of_its_kind(store, write):
    run = store.publish(write("run", {"policy/model": "w", "trajectories/step-0.parquet": "t"}), "rl-run")
    policy = store.publish(write("part", {"model": "w"}), "model")
    for key, stage, output, inputs in ((KEY, "rl", run, {}), (OTHER_KEY, "part", policy, {"whole": str(run)})):
        fields = {"key": key, "stage": stage, "label": stage, "inputs": inputs, "output": str(output)}
        store.backend.put(stage_path(key), json.dumps(fields).encode())
    record = store.records.find(KEY)
    assert record.outputs == {"rl-run": run}
    assert record.output == run
    assert store.records.find(OTHER_KEY).outputs == {"model": policy}
    assert collect(store, delete=True, older_than=-1).garbage == ()
    with Graph.of(store) as graph:
        tree = text_tree(Tree(graph, policy, upward=True))
    assert "by part (part), seed" in tree
    assert f"whole: {run.short}" in tree
    assert "by rl (rl), seed" in tree


def test_a_stage_record_holds_its_outputs_in_their_order(store, outputs, draft):
    store.publish_outputs(dict(reversed(outputs.items())), draft())
    written = json.loads(store.backend.read(stage_path(KEY)))
    assert "output" not in written
    assert list(written["outputs"]) == ["trajectories", "best", "policy"]
    assert open_store(store.uri).records.find(KEY).output.kind == "trajectories"


def test_a_directory_that_is_no_output_stops_the_stage_before_anything_is_written(store, outputs, draft):
    shutil.rmtree(outputs["trajectories"][0])
    outputs["trajectories"][0].mkdir()
    with pytest.raises(UserError, match="holds no file"):
        store.publish_outputs(outputs, draft())
    assert list(store.artifacts()) == []
