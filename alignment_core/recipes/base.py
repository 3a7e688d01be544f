"""The base of every configuration object: frozen, typed, and closed to unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A piece of a recipe. Field descriptions are what ``--help``, the run form and the docs show."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
