"""The two sides of a channel in processes of their own, which report what they got or the error that ended them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from alignment_core.errors import first_line
from alignment_core.inference.channels.channel import Channel, Receiver, Sender

Weights = list[tuple[str, torch.Tensor]]
Report = tuple[str, Any]
"""The name of an error and its text; ``ok`` and the result."""
_FORK: Any = multiprocessing.get_context("fork")


def weights_of(seed: int, rows: int = 300) -> Weights:
    """Tensors of several types and shapes: one is larger than a bucket of 64 KiB, one a number, and one empty."""
    noise = torch.Generator().manual_seed(seed)
    large = torch.randn(rows, 131, generator=noise)
    return [
        ("embed", large),
        ("norm", torch.randn(7, generator=noise).to(torch.bfloat16)),
        ("transposed", torch.randn(5, 9, generator=noise).T),
        ("number", torch.tensor(float(seed))),
        ("empty", torch.empty(0, 3)),
        ("numbers", torch.randint(0, 9, (3, 3), generator=noise, dtype=torch.int8)),
        ("head", torch.randn(64, 64, generator=noise).to(torch.float16)),
    ]


class Sides:
    """A sender and some receivers, each in a process."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.processes: list[Any] = []
        self._reports: list[Connection] = []
        self._address: Any = None

    def start(
        self, send: Callable[[Sender], Any], receive: Callable[[Receiver], Any], *others: Callable[[Receiver], Any]
    ) -> None:
        """Start a sender that does ``send``, and receivers that do ``receive``, of which the last do ``others``."""
        there, here = _FORK.Pipe()
        self._fork(lambda: self._sender(there, send))
        self._address = here.recv()
        same = self.channel.receivers - len(others)
        for of_receiver in [*[receive] * same, *others]:
            self._fork(partial(self._receiver, of_receiver))

    def _receiver(self, receive: Callable[[Receiver], Any]) -> Any:
        return receive(Receiver(self.channel, self._address))

    def _sender(self, there: Connection, send: Callable[[Sender], Any]) -> Any:
        sender = Sender(self.channel)
        there.send(sender.address)
        return send(sender)

    def _fork(self, function: Callable[[], Any]) -> None:
        here, there = _FORK.Pipe()

        def run() -> None:
            torch.set_num_threads(1)
            try:
                report: Report = ("ok", function())
            except Exception as error:
                report = (type(error).__name__, first_line(error))
            there.send(report)

        process = _FORK.Process(target=run, daemon=True)
        process.start()
        there.close()
        self.processes.append(process)
        self._reports.append(here)

    def reports(self) -> list[Report]:
        """What the sender and each receiver report."""
        return [_report(connection) for connection in self._reports]

    def report_of_sender(self) -> Report:
        """What the sender reports."""
        return _report(self._reports[0])

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def _report(connection: Connection) -> Report:
    """What a process reports; ``killed`` if it cannot, and ``hangs`` if it does not within half a minute."""
    if not connection.poll(30.0):
        return "hangs", None
    try:
        report: Report = connection.recv()
    except EOFError:
        return "killed", None
    return report


def sends(*updates: Weights) -> Callable[[Sender], None]:
    """Send these updates one after the other."""

    def send(sender: Sender) -> None:
        for weights in updates:
            sender.send(weights)

    return send


def receives(count: int) -> Callable[[Receiver], list[dict[str, torch.Tensor]]]:
    """Receive so many updates."""

    def receive(receiver: Receiver) -> list[dict[str, Any]]:
        updates = []
        for _ in range(count):
            with receiver.receiving() as weights:
                updates.append(dict(weights))
        return [{name: (tensor.dtype, tensor.tolist()) for name, tensor in update.items()} for update in updates]

    return receive


def as_received(weights: Weights) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in weights}


def killed_after(count: int, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """These weights, whose process is killed after ``count`` of them."""
    for number, weight in enumerate(weights):
        if number == count:
            os.kill(os.getpid(), signal.SIGKILL)
        yield weight


def failing_after(count: int, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """These weights, with an error after ``count`` of them."""
    for number, weight in enumerate(weights):
        if number == count:
            raise ValueError("the weights are not finite")
        yield weight
