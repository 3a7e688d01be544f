"""The token that changes in the pages need."""

from __future__ import annotations

from pathlib import Path

from alignment.flows import access
from alignment_core.home import align_home


def token() -> str:
    """The token of the pages of this home, which stays the same; of a home that cannot be written, one that nobody knows.

    Raises UserError for a file with too short a one.
    """
    try:
        token_file().parent.mkdir(mode=0o700, exist_ok=True)
        return access.password(token_file())
    except OSError:
        return access.new_token()


def token_file() -> Path:
    """The file with the token, for this user only."""
    return align_home() / "ui" / "token"
