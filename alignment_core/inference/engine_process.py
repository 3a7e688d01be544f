"""The process of vLLM's engine, started before that of its server imports vLLM, so that both import at the same time.

vLLM starts it once it knows the model, and it would import for seconds then, while the other cores wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any


class EngineProcess(SpawnProcess):
    """A process that imports the main module as soon as it is made, and waits for :meth:`start`, which gives it its ``work``.

    It has the environment of the call of ``start``, like any other, except for what only counts when a program starts, as
    the LD_PRELOAD that vLLM sets for torch's libgomp, which torch itself loads.
    """

    work: tuple[Callable[..., object], dict[str, Any]]
    """A function, and its arguments."""

    def __init__(self) -> None:
        receiver, sender = Pipe(duplex=False)
        super().__init__(target=_wait_for_work, args=(receiver,), daemon=True)  # a server that fails first ends it
        super().start()
        receiver.close()
        self._sender = sender

    def start(self) -> None:
        self._sender.send((self.name, dict(os.environ)))
        self._sender.send(self.work)
        self._sender.close()


def _wait_for_work(receiver: Connection) -> None:
    process = current_process()
    process.name, environment = receiver.recv()
    process.daemon = False  # one may have no processes of its own, as engines with tensor parallelism have
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:  # unchanged ones stay where setproctitle looks for them
            os.environ[name] = value
    function, arguments = receiver.recv()
    receiver.close()
    function(**arguments)


class EngineContext(SpawnContext):
    """For ``vllm.v1.engine.utils``: the first process that it makes is one that already imports."""

    def __init__(self) -> None:
        self._importing = [EngineProcess()]

    def Process(self, **of: Any) -> SpawnProcess:  # type: ignore[override]
        queue = of["kwargs"].get("tensor_queue")  # can only be given to a process that is being started
        if queue is not None or not self._importing:
            return SpawnProcess(**of)
        process = self._importing.pop()
        process.name, process.work = of["name"], (of["target"], of["kwargs"])
        return process
