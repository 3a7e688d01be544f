"""Tasks of rounds that train on the best completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alignment.tasks.graph import Input, Step, submit
from alignment_core.recipes.sections.rejection_sampling import BestConfig
from alignment_core.stages.gain import GainConfig
from alignment_core.stages.select_best import SelectBestConfig


def select_best(
    label: str,
    selection: BestConfig,
    rollouts: Input,
    scores: Input,
    earlier: Input | None = None,
    may_be_empty: bool = False,
) -> Step:
    """Make demonstrations of the best completions, added to the rows of ``earlier``.

    A stage that keeps none fails, unless it ``may_be_empty``: then ask it for ``new`` before anything trains on it.
    """
    config = SelectBestConfig(selection=selection, may_be_empty=may_be_empty)
    return submit("select_best", label, config, {"rollouts": rollouts, "scores": scores, "earlier": earlier})


def gain(
    label: str,
    rounds: int,
    kept: Sequence[Input],
    policies: Sequence[str],
    evaluations: Mapping[str, Input],
    metric: str | None,
    min_gain: float | None,
) -> Step:
    """Compare the policies that rounds have made so far, which ``kept`` these rows; see the stage ``gain``."""
    config = GainConfig(policies=tuple(policies), kept=len(kept), rounds=rounds, metric=metric, min_gain=min_gain)
    inputs = {f"kept-{number}": one for number, one in enumerate(kept, start=1)}
    if metric is not None:
        inputs |= {f"policy-{number}": evaluations[label] for number, label in enumerate(policies)}
    return submit("gain", label, config, inputs)
