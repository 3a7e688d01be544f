"""Buckets in the memory of a GPU, which a fake stands for: `make gpu` transfers weights through a real one's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alignment_core.inference.channels import gpu_memory
from alignment_core.inference.channels.channel import BUFFERS, Channel, Receiver, Sender, gpu_bucket_bytes
from tests.inference.fake_cuda import FakeCuda
from tests.inference.sides import Sides, as_received, receives, weights_of

MIB, GIB = 1 << 20, 1 << 30
UPDATES = [weights_of(1), weights_of(2, rows=1_000), [], weights_of(3)[::-1]]
Start = Callable[..., list[Any]]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Sends updates to receivers on these GPUs; reports of the sender, on GPU-0, and of the receivers: the updates and how many
    buffers each has mapped."""
    monkeypatch.setattr(gpu_memory, "Cuda", FakeCuda)
    made: list[Sides] = []

    def start(*gpus: str, **fake: Any) -> list[Any]:
        for name, value in fake.items():
            monkeypatch.setattr(FakeCuda, name, value)
        sides = Sides(Channel("memory", len(gpus), 20.0, on_gpus=True, bucket_bytes=1 << 16))
        made.append(sides)
        sides.start(_send, receives(0), *map(_receives_on, gpus))
        return sides.reports()

    yield start
    for sides in made:
        sides.end()


def _send(sender: Sender) -> list[int]:
    """Send the updates; bytes of the GPU's memory that are left allocated after each."""
    left = []
    for update in UPDATES:
        sender.send(update)
        left.append(FakeCuda.allocated_bytes)
    return left


def _receives_on(gpu: str) -> Callable[[Receiver], Any]:
    def receive(receiver: Receiver) -> Any:
        FakeCuda.own = gpu
        return receives(len(UPDATES))(receiver), FakeCuda.mappings

    return receive


EXPECTED = [as_received(update) for update in UPDATES]
MAPPED = BUFFERS * len(UPDATES)


def test_receivers_on_the_senders_gpu_map_its_buffers_in_each_update(reports: Start) -> None:
    sender, *receivers = reports("GPU-0", "GPU-0")
    assert receivers == [("ok", (EXPECTED, MAPPED))] * 2
    assert sender == ("ok", [0] * len(UPDATES)), "the engines have the GPU's memory in between"


def test_receivers_on_other_gpus_read_copies(reports: Start) -> None:
    _, *receivers = reports("GPU-1", "GPU-0", "GPU-2")
    assert receivers == [("ok", (EXPECTED, mapped)) for mapped in (0, MAPPED, 0)]


@pytest.mark.parametrize("lacks", ["exports", "maps"])
def test_where_memory_cannot_be_shared_all_read_copies(lacks: str, reports: Start) -> None:
    _, *receivers = reports("GPU-0", "GPU-1", **{lacks: False})
    assert receivers == [("ok", (EXPECTED, 0))] * 2


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
