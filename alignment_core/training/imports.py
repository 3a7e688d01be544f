"""What a trainer imports before it joins the others. Not part of ``ranks.py``, which is in the keys of all trainings."""

from __future__ import annotations

from alignment_core.imports import uncollected


def prepare() -> None:
    """Import DeepSpeed, without its search for operators that this machine could compile.

    The first access to their table compiles and links programs, and DeepSpeed reads only the entry that
    :func:`~alignment_core.training.ranks.join` writes.
    """
    with uncollected():
        import deepspeed
    deepspeed.ops.__compatible_ops__ = {}
