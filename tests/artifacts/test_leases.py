"""Leases: one holder at a time, the dead found out at once or by the store's clock, and publishers beside a collector."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from alignment_core.artifacts import Store, collect, leases, open_store
from alignment_core.artifacts.leases import Lease, Leases
from alignment_core.artifacts.paths import COLLECTOR, PUBLICATIONS
from alignment_core.errors import Conflict, InfrastructureError
from alignment_core.processes import ProcessId
from tests.processes import ended, in_child, wait_until

PATH = "leases/test.json"
ELSEWHERE = ProcessId(pid=1, started=1, boot="another boot")


def written_elsewhere(store: Store, seconds: float = 60.0) -> None:
    assert store.backend.put(PATH, Lease(owner="run 7", process=ELSEWHERE, seconds=seconds).model_dump_json().encode())


def live_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases that this process acquires live for so many seconds."""
    monkeypatch.setattr(leases, "SECONDS", seconds)
    monkeypatch.setattr(leases, "SECONDS_FEW_WRITES", seconds)


def test_a_lease_has_a_single_holder_and_ends_with_it(store: Store) -> None:
    lease = store.leases.acquire(PATH, "the first")
    assert lease is not None
    assert store.leases.acquire(PATH) is None
    holder = store.leases.holder(PATH)
    assert holder is not None
    assert holder.owner == "the first"
    lease.release()
    assert store.leases.holder(PATH) is None
    again = store.leases.acquire(PATH)
    assert again is not None
    again.release()


def test_a_holder_that_died_here_is_followed_at_once(store: Store) -> None:
    def holds() -> None:
        assert store.leases.acquire(PATH)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(holds)) == -signal.SIGKILL
    began = time.monotonic()
    with store.leases.hold(PATH):
        assert time.monotonic() - began < 5, "no time to live had to pass"


def test_a_zombie_process_holds_no_lease(store: Store) -> None:
    def holds() -> None:
        assert store.leases.acquire(PATH)
        os._exit(0)

    child = in_child(holds)
    assert wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 30)
    assert store.leases.holder(PATH) is None
    ended(child)


def test_a_machine_that_lost_its_home_and_has_another_name_is_still_known(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a new container's: identity comes from the kernel, not from a file below ALIGN_HOME or the host name."""
    lease = store.leases.acquire(PATH)
    assert lease is not None
    monkeypatch.setenv("ALIGN_HOME", str(home / "another"))
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert store.leases.holder(PATH) is not None
    lease.release()
    assert ProcessId(pid=os.getpid(), started=1, boot=ProcessId.mine().boot).lives() is False, (
        "its number was used again"
    )


def test_a_child_does_not_keep_its_parent_alive(store: Store) -> None:
    """A holder that forks and dies leaves a child, which must not count as the holder."""
    ready, over = os.pipe(), os.pipe()

    def holds() -> None:
        assert store.leases.acquire(PATH)
        if os.fork() == 0:
            os.write(ready[1], b"!")
            os.close(over[1])
            os.read(over[0], 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(holds)) == -signal.SIGKILL
    os.read(ready[0], 1)
    assert store.leases.holder(PATH) is None
    os.close(over[1])


def test_a_lease_of_another_machine_expires_by_the_stores_clock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    written_elsewhere(store, seconds=60)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 9e9)  # the clock of a machine that is far ahead
    assert store.leases.acquire(PATH) is None
    monkeypatch.setattr(store.backend, "now", lambda: now + 50)
    assert store.leases.acquire(PATH) is None
    monkeypatch.setattr(store.backend, "now", lambda: now + 70)
    lease = store.leases.acquire(PATH)
    assert lease is not None
    lease.release()


def test_exactly_one_of_many_successors_gets_an_expired_lease(store: Store) -> None:
    written_elsewhere(store, seconds=1e-9)
    start, won = threading.Barrier(16), []

    def follows() -> None:
        start.wait()
        if lease := store.leases.acquire(PATH):
            won.append(lease)

    threads = [threading.Thread(target=follows) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = won
    winner.check()
    winner.release()


def test_a_holder_notices_a_lost_lease_and_leaves_its_successors_lease_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_for(0.6, monkeypatch)
    lease = store.leases.acquire(PATH)
    assert lease is not None
    stored = store.backend.stat(PATH)
    assert stored is not None
    other = Lease(owner="the next", process=ELSEWHERE, seconds=60)
    while not store.backend.put(PATH, other.model_dump_json().encode(), replaces=stored.version):
        stored = store.backend.stat(PATH)  # it was renewed just now
        assert stored is not None
    assert wait_until(lease.is_lost, 30)
    with pytest.raises(Conflict, match="others may have taken over from this process"):
        lease.check()
    lease.release()
    holder = store.leases.holder(PATH)
    assert holder is not None
    assert holder.owner == "the next"


def test_a_holder_that_cannot_renew_notices_the_loss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    live_for(0.3, monkeypatch)
    lease = store.leases.acquire(PATH)
    assert lease is not None

    def fails(*_: object, **__: object) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(store.backend, "put", fails)
    assert wait_until(lease.is_lost, 30)
    with pytest.raises(Conflict, match="not renewed in time"):
        lease.check()
    lease.release()


@pytest.mark.parametrize("renewed", [False, True])
def test_a_renewal_without_an_answer_does_not_lose_the_lease(
    store: Store, monkeypatch: pytest.MonkeyPatch, renewed: bool
) -> None:
    live_for(0.9 if renewed else 600, monkeypatch)
    lease = store.leases.acquire(PATH)
    assert lease is not None
    put, failed = store.backend.put, threading.Event()

    def silent_once(path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        version = put(path, source, replaces)
        if path == PATH and not failed.is_set():
            failed.set()
            raise InfrastructureError("the store does not answer")
        return version

    monkeypatch.setattr(store.backend, "put", silent_once)
    if renewed:
        assert failed.wait(30)
        assert wait_until(lambda: lease.lease.renewals > 1 or lease.is_lost(), 30)
        lease.check()
    else:
        with pytest.raises(InfrastructureError):
            lease._write()
    lease.release()
    assert store.backend.stat(PATH) is None


def test_a_release_finds_its_lease_after_two_unanswered_renewals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    live_for(600, monkeypatch)
    lease = store.leases.acquire(PATH)
    assert lease is not None
    put = store.backend.put

    def silent(path: str, source: bytes | Path, replaces: str | None = None) -> str | None:
        put(path, source, replaces)
        raise InfrastructureError("the store does not answer")

    def blind(path: str) -> None:
        raise InfrastructureError("the store does not answer")

    for name, fails in (("put", silent), ("stat", blind)):  # the second try learns that another version is there
        with monkeypatch.context() as away:
            away.setattr(store.backend, name, fails)
            with pytest.raises(InfrastructureError):
                lease._write()
    lease.release()
    assert store.backend.stat(PATH) is None


def test_a_store_with_leases_travels(store: Store) -> None:
    assert isinstance(pickle.loads(pickle.dumps(store)).leases, Leases)


# ------------------------------------------------------------------ collectors


def test_a_publisher_waits_for_a_live_collector_and_not_for_a_dead_one(store: Store, write) -> None:  # type: ignore[no-untyped-def]
    reference = store.publish(write("d"), "model")
    with store.leases.hold(COLLECTOR):
        publisher = in_child(lambda: open_store(store.uri).publish(write("d"), "model"))
        deadline = time.monotonic() + 30
        while len(list(store.backend.list(PUBLICATIONS))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        assert os.waitpid(publisher, os.WNOHANG) == (0, 0), "it has announced the objects that it needs, and waits"
    assert ended(publisher) == 0
    assert store.verify(reference) == []

    def collector_that_dies() -> None:
        with store.leases.hold(COLLECTOR):
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(collector_that_dies)) == -signal.SIGKILL
    store.publish(write("e", {"n": "1"}), "model")


def test_a_collector_spares_objects_that_a_publisher_elsewhere_protects(store: Store, write) -> None:  # type: ignore[no-untyped-def]
    reference = store.publish(write("d"), "model")
    for publication in store.backend.list(PUBLICATIONS):
        store.backend.delete(publication.path)
    blobs = [entry.sha256 for entry in store.manifest(reference).files]
    lease = Lease(owner="elsewhere", process=ELSEWHERE, seconds=3600, protects=(reference.digest, *blobs))
    store.backend.put(f"{PUBLICATIONS}theirs.json", lease.model_dump_json().encode())
    assert collect(store, delete=True, older_than=-1).garbage == ()
    store.backend.delete(f"{PUBLICATIONS}theirs.json")
    assert len(collect(store, delete=True, older_than=-1).of("blob")) == 2
