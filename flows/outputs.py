"""What a composition hands back. Imports no Prefect."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Outputs(BaseModel):
    """What a composition hands back: the steps that made the run's results."""

    model_config = {"arbitrary_types_allowed": True}

    policy: Any = None
    reward_model: Any = None
    report: Any = None
    final: str | None = None
    """Label of the policy that may be promoted, as the report calls it."""
    baseline: str | None = None
