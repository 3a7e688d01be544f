"""Importing large libraries in less time."""

from __future__ import annotations

import csv
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

_OF_PYTHON = metadata.packages_distributions


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports that last seconds: a quarter of them is looking for garbage among objects that all stay. A tenth of that of
    transformers is Python's ``packages_distributions``: a quicker one gives it the same names."""
    metadata.packages_distributions = packages_distributions
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        metadata.packages_distributions = _OF_PYTHON


def packages_distributions() -> dict[str, list[str]]:
    """The distributions that install each top-level module or package: as ``importlib.metadata.packages_distributions``, which
    makes an object of each of tens of thousands of installed files and of each line of all descriptions."""
    by_name: dict[str, list[str]] = {}
    for distribution in metadata.distributions():
        names = set((distribution.read_text("top_level.txt") or "").split())
        if not names:
            rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
            names = {path.partition("/")[0].removesuffix(".py") for path, *_ in rows if path.endswith(".py")}
        description = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        name = next((line[5:].strip() for line in description.splitlines() if line.startswith("Name:")), "")
        for top in names:
            by_name.setdefault(top, []).append(name)
    return by_name


@contextmanager
def uncompiled() -> Iterator[None]:
    """For imports of vLLM: ``uncollected``, and without torch's compiler if that is off. vLLM registers operators with it, and
    its import takes a second."""
    compiler = ["torch._inductor.lowering"] if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else []
    with uncollected(), hidden(*compiler):
        yield


@contextmanager
def without_ray() -> Iterator[None]:
    """For vLLM's server on a CPU, where vLLM has no executor with Ray: to import that takes each process a third of a
    second."""
    with hidden(*(["ray"] if on_a_cpu() else [])):
        yield


def on_a_cpu() -> bool:
    """Whether this process has the environment of a server or engine on a CPU, which shows no GPU: see
    :data:`alignment_core.cluster.device.ON_A_CPU`, which takes longer to import."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == ""


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Hide optional modules during the import of a library that would otherwise import them."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: not to be found
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
