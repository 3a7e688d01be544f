"""What a composition hands back. Imports no Prefect."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Outputs(BaseModel):
    """What a composition hands back: the steps that made the run's results."""

    model_config = {"arbitrary_types_allowed": True}

    policy: Any = None
    reward_model: Any = None
    rollouts: Any = None
    report: Any = None
    final: str | None = None
    """Label of the policy that may be promoted, as the report calls it."""
    baseline: str | None = None
    evaluations: Any = None
    """Where they are judged, if what the promotion's tag names is to be judged beside them; None where the baseline is
    what it named when the composition was made, ``replaces``."""
    replaces: Any = None
    summary: Any = None
    """A step whose metrics are the run's, too."""
