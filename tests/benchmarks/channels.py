"""Channels for weights by themselves, with random weights, without vLLM: seconds of an update, and CPU seconds of each side."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from alignment_core.cluster import ray_cluster
from alignment_core.cluster.device import Device
from alignment_core.cluster.group import ActorGroup, wait_together
from alignment_core.cluster.layout import Place
from alignment_core.inference.channels.buckets import Assembler, Bucket, from_bucket
from alignment_core.inference.channels.channel import Channel, Receiver, Sender
from alignment_core.inference.channels.control import Address
from alignment_core.inference.channels.ray_objects import RaySender
from alignment_core.recipes import ResourcesConfig

KINDS = ("memory", "broadcast", "ray")
SIZES, REPEATS, WAIT = (64, 512), 5, 120.0
"""MiB of all weights, updates that are measured, and the deadline of each call."""
TENSOR_BYTES = 8 << 20


class Side:
    """A process of a benchmark."""

    def processor_seconds(self) -> float:
        """Of this process."""
        return time.process_time()


class Source(Side):
    """As rank 0 of the trainers."""

    def __init__(self, mib: int) -> None:
        torch.set_num_threads(1)
        count = (mib << 20) // TENSOR_BYTES
        self.weights = [(f"layer.{number}", torch.randn(TENSOR_BYTES // 4)) for number in range(count)]
        self.sender: Any = None

    def open_channel(self, channel: Channel | RaySender) -> Address | None:
        """As that of the trainers."""
        self.sender = channel if isinstance(channel, RaySender) else Sender(channel)
        return getattr(self.sender, "address", None)

    def send_weights(self) -> None:
        """As that of the trainers."""
        self.sender.send(self.weights)


class Sink(Side):
    """As an engine's worker that does nothing with the weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.receiver: Any = None
        self.assembler = Assembler()

    def open_channel(self, channel: Channel, address: Address) -> None:
        """As that of an engine."""
        self.receiver = Receiver(channel, address)

    def receive_weights(self) -> None:
        """As that of an engine."""
        with self.receiver.receiving() as weights:
            for _ in weights:
                pass

    def load_bucket(self, bucket: Bucket) -> None:
        """As that of an engine."""
        from_bucket(self.assembler, bucket)


def measured(folder: Path, receivers: int = 1) -> Iterator[dict[str, Any]]:
    """A line for each kind of channel and size."""
    ray = ray_cluster.connect(folder)
    device, resources = Device("cpu", receivers + 1), ResourcesConfig(engines=receivers, threads=1)
    of_sinks = [device.engine_environment(resources, Place())] * receivers
    of_source = device.trainer_environment(resources, 1)
    sinks: ActorGroup[Sink] = ActorGroup(ray, "sinks", [Place()] * receivers, of_sinks, WAIT)
    sources: ActorGroup[Source] = ActorGroup(ray, "sources", [Place()], [of_source], WAIT)
    for mib in SIZES:
        for kind in KINDS:
            sources.make(f"{__name__}:Source", [{"mib": mib}])
            sinks.make(f"{__name__}:Sink", [{}] * receivers)
            yield {"channel": kind, "mib": mib, "receivers": receivers, **_of_updates(kind, sources, sinks, mib)}
    sinks.kill()
    sources.kill()
    ray.shutdown()


def _of_updates(kind: Any, sources: ActorGroup[Source], sinks: ActorGroup[Sink], mib: int) -> dict[str, float]:
    """Medians of some updates, after one that is not measured."""
    if kind == "ray":
        sources.all(Source.open_channel, RaySender(sinks.actors, Sink.load_bucket.__name__, WAIT))
    else:
        channel = Channel(kind, sinks.size, WAIT)
        (address,) = sources.all(Source.open_channel, channel)
        assert address is not None
        sinks.all(Sink.open_channel, channel, address)
    laps = [_update(kind, sources, sinks) for _ in range(1 + REPEATS)][1:]
    seconds, sender, receiver, driver = (statistics.median(column) for column in zip(*laps, strict=True))
    gib = mib / 1024
    return {
        "seconds": round(seconds, 4),
        "seconds_per_gib": round(seconds / gib, 3),
        "sender_processor_seconds_per_gib": round(sender / gib, 3),
        "receiver_processor_seconds_per_gib": round(receiver / gib, 3),
        "driver_processor_seconds": round(driver, 4),
    }


def _update(kind: str, sources: ActorGroup[Source], sinks: ActorGroup[Sink]) -> Sequence[float]:
    """Seconds of an update, and processor seconds of the sender, a receiver and this process."""
    before = [sources.one(0, Side.processor_seconds), sinks.one(0, Side.processor_seconds)]
    own, started = time.process_time(), time.perf_counter()
    if kind == "ray":
        sources.all(Source.send_weights)
    else:
        wait_together(sinks.started(Sink.receive_weights), sources.started(Source.send_weights))
    seconds, driver = time.perf_counter() - started, time.process_time() - own
    after = [sources.one(0, Side.processor_seconds), sinks.one(0, Side.processor_seconds)]
    return [seconds, *(later - earlier for later, earlier in zip(after, before, strict=True)), driver]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:
        for line in measured(Path(folder)):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    from tests.benchmarks import channels  # by the name under which actors import it

    channels.main()
