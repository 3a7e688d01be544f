"""What is particular to a recipe that runs every night: where its rows arrive is said by ``dpo.data``."""

from __future__ import annotations

from pydantic import Field

from alignment_core.recipes.base import Config
from alignment_core.recipes.sections.data import DataConfig, DataSource


class NightlyConfig(Config):
    """Which rows a night takes, and the ledger in which it records them."""

    inbox: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9._-]*$")
    """Name of the ledger; its nights are the history of the tag `nightly/<inbox>/nights`. Default: the recipe's name.
    Recipes with the same ledger share the rows: each row goes to one of them."""
    min_rows: int = Field(1, ge=1)
    """Minimum number of new rows; with fewer the night is empty, and they wait for the next one."""


def check_inbox(data: DataConfig, min_rows: int) -> None:
    """Raise ValueError if rows cannot keep arriving in ``data``, or would leave nothing to train on."""
    for number, source in enumerate(data.sources):
        given = DataSource(path=source.path or "", format=source.format, columns=source.columns)
        if source.task is not None or source != given:
            raise ValueError(
                f"`dpo.data.sources.{number}`: rows arrive in a file, folder, glob or `store:` prefix; give `path` and, "
                "if need be, `format` and `columns`, and nothing else"
            )
    if data.test_rows >= min_rows:
        raise ValueError(
            f"`dpo.data.test_rows` ({data.test_rows}) must be less than `nightly.min_rows` ({min_rows}), or a small "
            "night leaves no row to train on"
        )
