"""The results of a composition."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Outputs(BaseModel):
    """The results of a composition: steps, or artifacts."""

    model_config = {"arbitrary_types_allowed": True}

    policy: Any = None
    reward_model: Any = None
    rollouts: Any = None
    report: Any = None
    final: str | None = None
    """Label in the report of the policy that may be promoted."""
    baseline: str | None = None
    evaluations: Any = None
    """The :class:`~alignment_core.composition.evaluations.Evaluations`, in which the policy of the promotion's tag can be
    evaluated, too. None if the baseline is that policy already."""
    replaces: Any = None
    """The policy of the promotion's tag when the stages were composed, if that is the baseline."""
    comparisons: dict[str, Any] = {}
    """Further reports, by the branch whose policies they compare."""
    summary: Any = None
    """A step whose metrics are added to those of the run."""
