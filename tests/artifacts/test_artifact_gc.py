"""Garbage collection: which objects it deletes, and that it may run beside publishers and readers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time

from alignment_core.artifacts import collect, open_store
from alignment_core.artifacts.paths import COLLECTOR
from tests.artifacts.conftest import age

KEY = "a" * 64


def test_only_unreachable_objects_are_garbage(store, write, draft):
    data = store.publish(write("data", {"rows": "1"}), "dataset")
    output = store.publish(write("model"), "model", draft(inputs={"train": data}))
    old = store.publish(write("old", {"n": "1"}), "model")
    tagged = store.publish(write("new", {"n": "2"}), "model")
    store.tags.move("policy", old, None, "first")
    store.tags.move("policy", tagged, old, "better, but one may want to go back")
    orphan = store.publish(write("orphan", {"n": "3", "config.json": "{}"}), "model")  # shares one blob

    dry = collect(store, older_than=-1)
    assert not dry.deleted
    assert (len(dry.of("manifest")), len(dry.of("blob")), dry.size > 0, dry.kept) == (1, 1, True, 4)
    assert store.verify(orphan) == []
    assert "would delete 2 objects" in str(dry)

    assert collect(store, delete=True, older_than=-1).garbage == dry.garbage
    assert {manifest.reference for manifest in store.artifacts()} == {data, output, old, tagged}
    assert all(store.verify(manifest.reference) == [] for manifest in store.artifacts())
    assert collect(store, older_than=-1).garbage == ()


def test_young_objects_are_not_deleted(store, write):
    orphan = store.publish(write("d"), "model")
    assert collect(store, delete=True).garbage == ()
    assert store.verify(orphan) == []


def test_deleting_an_artifact_deletes_its_cache(store, write):
    cached = store.fetch(store.publish(write("d"), "model"))
    assert len(collect(store, delete=True, older_than=-1).of("cache")) == 1
    assert not cached.exists()


def test_progress_is_deleted_once_its_stage_is_finished(store, write, draft):
    (store.workspace.progress(KEY) / "step").write_text("state")
    (store.workspace.progress("b" * 64) / "step").write_text("state")
    store.publish(write("d"), "model", draft())
    assert collect(store, delete=True, older_than=-1).of("progress") == [f"progress/{KEY}"]
    assert (store.workspace.progress("b" * 64) / "step").exists()


def test_scratch_of_a_killed_process_is_deleted_and_of_a_live_process_kept(store, in_children):
    def die():
        with store.workspace.scratch() as fresh:
            (fresh / "half").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_children(die) == [-signal.SIGKILL]
    with store.workspace.scratch() as mine:
        assert len(collect(store, delete=True, older_than=-1).of("temporary")) == 1
        assert mine.is_dir()


def test_objects_in_flight_are_not_collected_at_any_age_limit(store, write, draft, monkeypatch):
    collections, mine = [], threading.local()

    def collecting(call):
        def first_collect(*args, **kwargs):
            if not vars(mine).get("collects"):
                mine.collects = True
                collections.append(collect(open_store(store.uri, writes=False), delete=True, older_than=0))
                mine.collects = False
            return call(*args, **kwargs)

        return first_collect

    with monkeypatch.context() as hooks:
        for module, name in ((os, "link"), (shutil, "copyfile"), (shutil, "rmtree"), (tempfile, "mkdtemp")):
            hooks.setattr(module, name, collecting(getattr(module, name)))
        with store.workspace.claim(KEY) as progress, store.workspace.scratch() as output:
            (progress / "step-1").write_text("state")
            outputs = {name: (output / name, "model") for name in ("policy", "best", "average")}
            for name, (folder, _) in outputs.items():
                folder.mkdir()
                (folder / "weights").write_text(name)
            published = store.publish_outputs(outputs, draft())
            assert (progress / "step-1").exists(), "its stage has not finished"
        assert (store.fetch(published["best"]) / "weights").read_text() == "best"
    assert len(collections) > 8
    assert store.records.find(KEY).outputs == published
    assert all(store.verify(reference) == [] for reference in published.values())


def test_recently_reused_objects_are_not_collected(store, write):
    directory = write("d")
    old = store.publish(directory, "model")
    age(store, 2)
    assert store.publish(directory, "model") == old
    assert collect(store, delete=True).garbage == ()
    age(store, 2)
    assert len(collect(store, delete=True).of("manifest")) == 1
    assert list(store.backend.list("leases/")) == []


def test_gc_beside_publishers_breaks_nothing(store, write, in_children, tmp_path):
    directories = [write(str(n), {"n": str(n), "shared": "in every artifact"}) for n in range(3)]
    counts, deadline = tmp_path / "counts", time.monotonic() + 120
    counts.mkdir()

    def deleted() -> int:
        return sum(file.stat().st_size for file in counts.iterdir())

    def goes_on() -> bool:
        return deleted() <= 20 and time.monotonic() < deadline

    def grow_old() -> None:
        an_hour_ago = time.time() - 3600
        for prefix in ("blobs/", "manifests/", "leases/"):
            for entry in store.backend.list(prefix):
                with contextlib.suppress(FileNotFoundError):
                    if entry.path != COLLECTOR:  # its holder would take it for another's
                        os.utime(store.backend.root / entry.path, (an_hour_ago, an_hour_ago))

    def publish() -> None:
        mine = open_store(store.uri)
        while goes_on():
            grow_old()  # now everything is an old orphan that gc may take
            reference = mine.publish(directories[0], "model")
            assert mine.verify(reference) == []

    def collects(name: str) -> None:
        with (counts / name).open("ab", buffering=0) as file:
            while goes_on():
                file.write(b"." * len(collect(open_store(store.uri), delete=True, older_than=60).garbage))

    assert in_children(publish, lambda: collects("one"), lambda: collects("other")) == [0, 0, 0]
    assert deleted() > 20
    again = [store.publish(directory, "model") for directory in directories]
    assert all(store.verify(reference) == [] for reference in again)
