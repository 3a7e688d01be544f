"""`rejection-sampling` from prompts with an answer that a verifier compares with, or from pairs by a reward model."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.rounds import rounds


def sections(facts: Profile) -> dict[str, Any]:
    return rounds(facts, "rejection-sampling", "rejection_sampling", (1e-5, 1e-3), {"min_score": 1})


START = Start(("preferences", "prompts"), sections, "prompts, and what says which answers are better")
