"""`iterative-dpo` from pairs by a reward model, or from prompts with an answer that a verifier compares with."""

from __future__ import annotations

from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.rounds import rounds


def sections(facts: Profile) -> dict[str, Any]:
    return rounds(facts, "iterative-dpo", "iterative_dpo", (5e-7, 2e-4), {})


START = Start(("preferences", "prompts"), sections, "prompts, and what says which answers are better")
