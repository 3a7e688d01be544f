"""Halts a process at a chosen call of a chosen function, so that a test can end its node there, however fast it is.

The source of this module is the ``sitecustomize`` of the processes of a node (:meth:`Halt.install`).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import shutil
import sys
import threading
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SETTINGS = "halt.json"


@dataclass(frozen=True)
class Halt:
    """The first ``times`` processes that call ``function``, which is ``package.module:Class.method``, for the ``call``-th time
    do not get any further."""

    function: str
    folder: str
    """Where each of them writes the name of its node; shared by all nodes."""
    call: int = 1
    times: int = 1

    def install(self, path: Path, node: str) -> None:
        """Make ``path`` a folder whose place on the PYTHONPATH halts the processes of the node of this name."""
        path.mkdir()
        shutil.copyfile(__file__, path / "sitecustomize.py")
        (path / SETTINGS).write_text(json.dumps({"halt": asdict(self), "node": node}))

    def node(self, number: int) -> str | None:
        """The name of the node on which the process with this number halted, from 0 on; None: none did so far."""
        try:
            return (Path(self.folder) / str(number)).read_text() or None
        except FileNotFoundError:
            return None

    def wait_here(self, node: str) -> None:
        """Halt this process, if it is one of the first."""
        for number in range(self.times):
            try:
                with (Path(self.folder) / str(number)).open("x") as file:
                    file.write(node)
            except FileExistsError:
                continue
            threading.Event().wait()


class _Finder:
    """Wraps the function when its module is imported: most processes of a node never import it."""

    def __init__(self, halt: Halt, node: str) -> None:
        self.halt = halt
        self.node = node
        self.module, _, self.name = halt.function.partition(":")
        self.calls = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self.wrap(module)

        loader.exec_module = executed
        return spec

    def wrap(self, module: ModuleType) -> None:
        *owners, name = self.name.split(".")
        owner: Any = operator.attrgetter(".".join(owners))(module) if owners else module
        function = getattr(owner, name)

        @functools.wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.halt.call:
                self.halt.wait_here(self.node)
            return function(*arguments, **named)

        setattr(owner, name, counted)


if __name__ == "sitecustomize":
    given = json.loads(Path(__file__).with_name(SETTINGS).read_text())
    sys.meta_path.insert(0, _Finder(Halt(**given["halt"]), given["node"]))
