"""Importing large libraries in less time."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports that last seconds: a quarter of them is looking for garbage among objects that all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def uncompiled() -> Iterator[None]:
    """For imports of vLLM: ``uncollected``, and without torch's compiler if that is off. vLLM registers operators with it, and
    its import takes a second."""
    compiler = ["torch._inductor.lowering"] if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else []
    with uncollected(), hidden(*compiler):
        yield


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
