"""What a check answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

State = Literal["ok", "warning", "failed"]
Answer = tuple[State, str]
"""The state, and one sentence: what was found and, where that is not good, the cure."""
Check = Callable[[], Answer]

SECONDS = 4.0
"""What has not answered by then has failed."""
