"""What a stage's function can really import: what its declaration is compared with."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

from alignment_core.execution.base import Stage, load_stage
from alignment_core.source_code import PACKAGE, Source, computing_source, parse, reachable

TRAINERS, ENGINES, JUDGES = "training.trainers", "inference.engines", "rewards.judges"
ACTORS = {
    "trainers": (TRAINERS,),
    "engines": (ENGINES,),
    "engines_and_trainers": (TRAINERS, ENGINES),
    "judges": (JUDGES,),
}
"""What a stage gets from its machines, by the method that it asks (``execution/machines.py``): our modules of the actors."""
PACKAGES_THAT_DO_NOT_COMPUTE = {
    "pyarrow",  # reads and writes tables: the same values in every version
    "safetensors",  # the same for weights
    "huggingface_hub",  # fetches what a commit pins
    "numpy",  # where its random numbers decide, the stage declares it all the same
    "pydantic",  # settings
    "httpx",  # asks endpoints
    "fastapi",  # answers agents
    "uvicorn",
    "psutil",
    "ray",  # placement
}


def computing(stage: Stage) -> set[str]:
    """Modules of ours that may compute the stage's result, whatever it is configured to do; plug-ins apart."""
    found: dict[str, tuple[Path, Source]] = {}
    waiting = [stage.run.__module__]
    while waiting:
        new = reachable(waiting.pop(), computing_source)
        waiting += [one for path, _ in new.values() for one in _actors(path) if one not in found | new]
        found |= new
    return {name for name in found if not (source := computing_source(name)) or not source[1].empty}


def _actors(path: Path) -> Iterable[str]:
    for node in ast.walk(parse(path.read_bytes())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "machines":
            yield from (f"{PACKAGE}.{one}" for one in ACTORS.get(node.attr, ()))


def imported_packages(modules: Iterable[str]) -> set[str]:
    """Installed packages that these modules of ours import, by the names that imports know them by."""
    found = set[str]()
    for module in modules:
        known = computing_source(module)
        assert known is not None
        found |= {name.partition(".")[0] for name in known[1].imports}
    return found - {PACKAGE} - set(sys.stdlib_module_names)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        modules = computing(load_stage(name))
        print(name, *sorted(modules), "packages:", *sorted(imported_packages(modules)), sep="\n  ")
