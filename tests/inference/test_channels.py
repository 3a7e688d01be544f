"""Channels for weights by themselves, each side in a process of its own: bytes arrive, and no side waits for a dead one."""

from __future__ import annotations

import os
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from alignment_core.cluster.ray_cluster import OBJECT_STORE_BYTES
from alignment_core.errors import DeadlineExceeded, PeerFailed
from alignment_core.inference.channels import gpu_memory
from alignment_core.inference.channels.buckets import BUCKET_BYTES, Assembler, fill_buckets, from_bucket, to_buckets
from alignment_core.inference.channels.channel import Channel, Receiver, Sender
from alignment_core.inference.channels.ray_objects import IN_STORE
from tests.inference.fake_cuda import FakeCuda
from tests.inference.sides import Sides, as_received, failing_after, killed_after, receives, sends, weights_of

KINDS = ("memory", "gpu memory", "broadcast")
Open = Callable[..., Sides]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes both sides of a channel with ``receivers`` receivers and buckets of 64 KiB."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(gpu_memory, "Cuda", FakeCuda)
    made: list[Sides] = []

    def opened(kind: str, receivers: int = 2, seconds: float = 20.0, sends_deltas: bool = False) -> Sides:
        made.append(Sides(channel_of(kind, receivers, seconds, sends_deltas)))
        return made[-1]

    yield opened
    for sides in made:
        sides.end()


def channel_of(kind: str, receivers: int, seconds: float, sends_deltas: bool = False) -> Channel:
    on_gpus = kind.startswith("gpu ")
    of_channel: Any = kind.removeprefix("gpu ")
    return Channel(of_channel, receivers, seconds, on_gpus=on_gpus, bucket_bytes=1 << 16, sends_deltas=sends_deltas)


@pytest.mark.parametrize("size", [16, 1_000, 1 << 16, 1 << 20])
def test_buckets_of_any_size_hold_all_bytes(size: int) -> None:
    weights = weights_of(1)
    if size == 16:
        weights = weights[1:]
    buckets = list(to_buckets(weights, size))
    assert all(len(numbers) == size for _, numbers in buckets[:-1])
    assembler = Assembler()
    received = [weight for bucket in buckets for weight in from_bucket(assembler, bucket)]
    assert [name for name, _ in received] == [name for name, _ in weights]
    for (_, tensor), (_, expected) in zip(received, weights, strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_buckets_in_rays_store_fit_into_it() -> None:
    assert (IN_STORE + 1) * BUCKET_BYTES < OBJECT_STORE_BYTES, "and one that is being made"


def test_received_tensors_outlive_their_bucket() -> None:
    """vLLM keeps the weights of a layer until it has all of them, while the buffer is filled again."""
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    ((layout, filled),) = fill_buckets(weights_of(1), lambda: buffer)
    received = dict(Assembler().add(layout, filled))
    buffer.zero_()
    assert torch.equal(received["embed"], weights_of(1)[0][1])


@pytest.mark.parametrize("receivers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_all_receivers_get_every_update_also_with_other_names_and_shapes(
    kind: str, receivers: int, opened: Open
) -> None:
    updates = [weights_of(1), weights_of(2), weights_of(3, rows=500)[:4], [], weights_of(4)[::-1]]
    sides = opened(kind, receivers)
    sides.start(sends(*updates), receives(len(updates)))
    assert sides.reports() == [("ok", None)] + [("ok", [as_received(update) for update in updates])] * receivers


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_travel_once(kind: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from alignment_core.inference.channels import channel as module

    layouts: list[Any] = []

    class Recording(module.Peers):
        def send(self, message: Any) -> None:
            if isinstance(message, dict) and "layout" in message:
                layouts.append(message["layout"] is not None)
            super().send(message)

    monkeypatch.setattr(module, "Peers", Recording)

    def send(sender: Sender) -> list[bool]:
        sends(weights_of(1), weights_of(2), weights_of(3, rows=500))(sender)
        return layouts

    sides = opened(kind)
    sides.start(send, receives(3))
    (status, with_layout), *_ = sides.reports()
    assert status == "ok"
    assert with_layout == [True] * 3 + [False] * 3 + [True] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_arrive_as_the_weights_that_were_sent(kind: str, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from alignment_core.inference.channels import channel as module

    sizes: list[int] = []

    class Recording(module.Peers):
        def send(self, message: Any) -> None:
            if isinstance(message, dict) and "size" in message:
                sizes[-1] += message["size"]
            super().send(message)

    monkeypatch.setattr(module, "Peers", Recording)
    changed = [(name, tensor.clone()) for name, tensor in weights_of(1)]
    changed[0][1][7, 5] = -0.0
    changed[-1][1][1] = 2.0  # 64 elements
    updates = [weights_of(1), changed, changed, weights_of(2, rows=500)[1:]]

    def send(sender: Sender) -> list[int]:
        for update in updates:
            sizes.append(0)
            sender.send(update)
        return sizes

    sides = opened(kind, sends_deltas=True)
    sides.start(send, receives(len(updates)))
    (status, sent), *received = sides.reports()
    assert received == [("ok", [as_received(update) for update in updates])] * 2
    assert status == "ok"
    full = [sum(tensor.nbytes for _, tensor in update) for update in updates]
    assert sent[0] == full[0]
    # 39,300 elements of fp32 and 4,096 of fp16 go as deltas: checksums, 65 values with gaps, one gap that is filled. The others
    # are 14, 180, 4, 0 and 9 bytes: a delta of the first is 8, of the second 8, of the number 4 whole, and of the last 8.
    assert sent[1] == (8 + 2 * 6) + 8 + 8 + 4 + 0 + 8 + (8 + 64 * 4)
    assert sent[2] == (8 + 6) + 8 + 8 + 4 + 0 + 8 + 8
    assert sent[3] == full[3]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_sender_ends_the_receivers_with_its_text(kind: str, opened: Open) -> None:
    sides = opened(kind)

    def send(sender: Sender) -> None:
        sender.send(weights_of(1))
        sender.send(failing_after(3, weights_of(2, rows=2_000)))

    sides.start(send, receives(2))
    sender, *others = sides.reports()
    assert sender == ("ValueError", "the weights are not finite")
    assert others == [("PeerFailed", "the trainer failed in a weight update: the weights are not finite")] * 2


@pytest.mark.parametrize("first", [True, False], ids=["at the first weight", "in a later update"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_receiver_ends_all_others_with_its_text(kind: str, first: bool, opened: Open) -> None:
    def fail(receiver: Receiver) -> None:
        if not first:
            receives(1)(receiver)
        with receiver.receiving() as weights:
            for _ in weights:
                raise ValueError("no layer of this name")

    sides = opened(kind, 3)
    sides.start(sends(weights_of(1), *[weights_of(2, rows=2_000)] * 3), receives(4), fail)
    sender, *others, failed = sides.reports()
    assert failed == ("ValueError", "no layer of this name")
    assert sender == ("PeerFailed", "an engine failed in a weight update: no layer of this name")
    assert [name for name, _ in others] == ["PeerFailed"] * 2
    assert all("no layer of this name" in text for _, text in others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_sender_ends_the_receivers(kind: str, opened: Open) -> None:
    sides = opened(kind)
    sides.start(lambda sender: sender.send(killed_after(3, weights_of(1, rows=2_000))), receives(1))
    sender, *others = sides.reports()
    assert sender == ("killed", None)
    assert others == [("PeerFailed", "the trainer ended in the middle of a weight update")] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_receiver_ends_the_sender_and_the_others(kind: str, opened: Open) -> None:
    def die(receiver: Receiver) -> None:
        with receiver.receiving() as weights:
            next(weights)
            os.kill(os.getpid(), signal.SIGKILL)

    sides = opened(kind, 3)
    sides.start(sends(*[weights_of(1, rows=2_000)] * 4), receives(4), die)
    sender, *others, killed = sides.reports()
    assert killed == ("killed", None)
    assert sender == ("PeerFailed", "an engine ended in the middle of a weight update")
    assert [name for name, _ in others] == ["PeerFailed"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_died_between_two_updates_is_noticed(kind: str, opened: Open) -> None:
    def send(sender: Sender) -> None:
        sender.send(weights_of(1))
        sender.send(weights_of(2))

    sides = opened(kind)
    sides.start(send, receives(2), receives(1))
    sender, other, _ = sides.reports()
    assert sender == ("PeerFailed", "an engine ended in the middle of a weight update")
    assert other[0] == "PeerFailed"


def test_waits_have_a_deadline(opened: Open) -> None:
    def wait(receiver: Receiver) -> None:
        time.sleep(60)

    sides = opened("memory", receivers=1, seconds=0.5)
    sides.start(sends(weights_of(1, rows=2_000)), wait)
    sender, text = sides.report_of_sender()
    assert sender == DeadlineExceeded.__name__
    assert text == "an engine did not answer within 0.5 seconds in a weight update (resources.wait_timeout_seconds)"


def test_a_sender_without_receivers_says_how_many_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignment_core.inference.channels.control.OPEN_SECONDS", 0.3)
    with pytest.raises(DeadlineExceeded, match="2 of 2 engine workers did not connect"):
        Sender(Channel("memory", 2, 5.0)).send(weights_of(1))


def test_a_receiver_of_a_closed_channel_fails_at_once() -> None:
    sender = Sender(Channel("memory", 1, 5.0))
    sender.close()
    with pytest.raises(PeerFailed, match=r"^the trainer's channel for weights is closed: "):
        Receiver(sender.channel, sender.address)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_without_the_key_gets_no_weights(kind: str) -> None:
    sender, stranger = Sender(channel_of(kind, 1, 5.0)), channel_of(kind, 1, 5.0)
    with pytest.raises(AuthenticationError):
        Receiver(stranger, sender.address)
    sender.close()


def test_a_silent_stranger_keeps_no_engine_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a scan of ports."""
    monkeypatch.setattr("alignment_core.inference.channels.control.PROOF_SECONDS", 1)
    sender = Sender(Channel("memory", 1, 20.0))
    with socket.socket(socket.AF_UNIX) as stranger, ThreadPoolExecutor(1) as pool:
        stranger.connect(sender.address)
        received = pool.submit(lambda: receives(1)(Receiver(sender.channel, sender.address)))
        sender.send(weights_of(1))
        assert received.result() == [as_received(weights_of(1))]
    sender.close()


def test_nothing_is_left_of_killed_processes(opened: Open) -> None:
    """Shared memory without a name, and sockets without files."""
    before = set(Path("/dev/shm").iterdir())
    sides = opened("memory")
    sides.start(lambda sender: sender.send(killed_after(3, weights_of(1, rows=9))), receives(1))
    assert [name for name, _ in sides.reports()] == ["killed", "PeerFailed", "PeerFailed"]
    sides.end()
    assert set(Path("/dev/shm").iterdir()) <= before


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process listens."""
    sockets = psutil.Process().net_connections("tcp")
    return {(*connection.laddr,) for connection in sockets if connection.status == psutil.CONN_LISTEN}


def test_a_broadcast_on_one_node_listens_on_the_loopback_interface_alone(opened: Open) -> None:
    with socket.create_server(("", 0)):  # as a process group of an earlier test
        inherited = listening()

        def send(sender: Sender) -> set[str]:
            sender.send(weights_of(1))
            return {host for host, _ in listening() - inherited}

        sides = opened("broadcast")
        sides.start(send, receives(1))
        assert sides.report_of_sender() == ("ok", {"127.0.0.1"})


def test_a_receiver_holds_the_tensors_of_no_bucket_but_the_last(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads each at once; two buckets of a GiB each would be in an engine's GPU otherwise."""
    from alignment_core.inference.channels import channel as module

    received: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def reference_to(weight: tuple[str, torch.Tensor]) -> weakref.ref[Any]:
        return weakref.ref(weight[1])

    class Counting(module.Assembler):
        def add(self, layout: Any, buffer: Any) -> Any:
            alive.append(sum(reference() is not None for reference in received))
            return super().add(layout, buffer)

    monkeypatch.setattr(module, "Assembler", Counting)

    def receive(receiver: Receiver) -> list[int]:
        with receiver.receiving() as weights:
            received.extend(map(reference_to, weights))
        return alive

    sides = opened("memory", 1)
    sides.start(sends([(str(number), torch.ones(1 << 12)) for number in range(12)]), receive)
    assert sides.reports()[1] == ("ok", [0, 0, 0]), "before each bucket of four tensors"
