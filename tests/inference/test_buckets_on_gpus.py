"""Buckets in the memory of a GPU, which a fake stands for: `make gpu` transfers weights through a real one's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alignment_core.inference.channels import gpu_memory
from alignment_core.inference.channels.buckets import BUCKET_BYTES
from alignment_core.inference.channels.channel import BUFFERS, Channel, Receiver, Sender, gpu_bucket_bytes
from alignment_core.inference.channels.control import Peers
from alignment_core.inference.channels.memory import SharedMemory
from tests.inference.fake_cuda import FakeCuda
from tests.inference.sides import Sides, as_received, receives, weights_of

MIB, GIB = 1 << 20, 1 << 30
UPDATES = [weights_of(1), weights_of(2, rows=1_000), [], weights_of(3)[::-1]]
Start = Callable[..., list[Any]]
_FORK: Any = multiprocessing.get_context("fork")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Sends updates to receivers on these GPUs; reports of the sender, on GPU-0: bytes of its GPU that are allocated after each
    update, and how many buffers it has allocated; and of the receivers: the updates and how many buffers each has mapped."""
    monkeypatch.setattr(gpu_memory, "Cuda", FakeCuda)
    made: list[Sides] = []

    def start(*gpus: str, bucket_bytes: int = 1 << 16, **fake: Any) -> list[Any]:
        for name, value in fake.items():
            monkeypatch.setattr(FakeCuda, name, value)
        sides = Sides(Channel("memory", len(gpus), 20.0, on_gpus=True, bucket_bytes=bucket_bytes))
        made.append(sides)
        sides.start(_send, receives(0), *map(_receives_on, gpus))
        return sides.reports()

    yield start
    for sides in made:
        sides.end()


def _send(sender: Sender) -> tuple[list[int], int]:
    """Send the updates; bytes of the GPU's memory that are left allocated after each, and the number of allocated buffers."""
    left = []
    for update in UPDATES:
        sender.send(update)
        left.append(FakeCuda.allocated_bytes)
    return left, FakeCuda.allocations


def _receives_on(gpu: str) -> Callable[[Receiver], Any]:
    def receive(receiver: Receiver) -> Any:
        FakeCuda.own = gpu
        return receives(len(UPDATES))(receiver), FakeCuda.mappings

    return receive


EXPECTED = [as_received(update) for update in UPDATES]
MAPPED = BUFFERS * len(UPDATES)
FREED = [0] * len(UPDATES)
"""Bytes that are left after each update: engines on the same GPU have its memory in between."""


def test_receivers_on_the_senders_gpu_map_its_buffers_in_each_update(reports: Start) -> None:
    sender, *receivers = reports("GPU-0", "GPU-0")
    assert receivers == [("ok", (EXPECTED, MAPPED))] * 2
    assert sender == ("ok", (FREED, MAPPED))


def test_receivers_on_other_gpus_read_copies(reports: Start) -> None:
    sender, *receivers = reports("GPU-1", "GPU-0", "GPU-2")
    assert receivers == [("ok", (EXPECTED, mapped)) for mapped in (0, MAPPED, 0)]
    assert sender == ("ok", (FREED, MAPPED))


def test_a_gpu_that_no_receiver_shares_holds_no_buffers(reports: Start) -> None:
    sender, *receivers = reports("GPU-1", "GPU-2")
    assert receivers == [("ok", (EXPECTED, 0))] * 2
    assert sender == ("ok", (FREED, 0))


@pytest.mark.parametrize("lacks", ["exports", "maps"])
@pytest.mark.parametrize("first", [0, 1], ids=["none", "the first buffer alone"])
def test_where_memory_cannot_be_shared_all_read_copies(first: int, lacks: str, reports: Start) -> None:
    """The sender tries it once, and gets back what it has exported, whether a receiver has mapped it or not."""
    sender, *receivers = reports("GPU-0", "GPU-1", **{lacks: first})
    mapped = first if lacks == "maps" else 0
    assert receivers == [("ok", (EXPECTED, mapped)), ("ok", (EXPECTED, 0))]
    assert sender == ("ok", (FREED, BUFFERS))


@pytest.mark.parametrize("gpus", [("GPU-1",), ("GPU-0", "GPU-1"), ("GPU-0",)])
def test_buckets_in_the_memory_of_the_cpu_have_the_size_that_is_usual_there(
    gpus: tuple[str, ...], reports: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = _FORK.SimpleQueue()

    class Recording(SharedMemory):
        def __init__(self, peers: Peers, is_sender: bool, size: int, count: int) -> None:
            sizes.put(size)
            super().__init__(peers, is_sender, size, count)

    monkeypatch.setattr(gpu_memory, "SharedMemory", Recording)
    _, *receivers = reports(*gpus, bucket_bytes=2 * BUCKET_BYTES, maps=BUFFERS * len(UPDATES) if len(gpus) == 2 else 0)
    assert [updates for _, (updates, _) in receivers] == [EXPECTED] * len(gpus)
    assert [sizes.get() for _ in range(1 + len(gpus))] == [BUCKET_BYTES] * (1 + len(gpus))


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ([80 * GIB, 60 * GIB], GIB),
        ([8 * GIB, 80 * GIB], GIB),  # both buffers of a GiB are a quarter of it
        ([80 * GIB, 5 * GIB], 640 * MIB),
        ([3 * MIB * 1024 + 12345], 384 * MIB),
        ([100 * MIB], 32 * MIB),  # no smaller than in the memory of a CPU
    ],
)
def test_two_buckets_take_a_quarter_of_the_least_free_memory_and_at_most_a_gib_each(
    free: list[int], expected: int
) -> None:
    assert gpu_bucket_bytes(free) == expected
