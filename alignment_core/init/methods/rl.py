"""`rl` (GRPO) from prompts with an answer that a verifier compares with, or from prompts alone and reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alignment_core.init.base import Profile, Start
from alignment_core.init.guess import ColumnMapping, reading
from alignment_core.init.sections import (
    check_verified,
    evaluation,
    generation,
    prompts,
    reward_list,
    steps,
    training,
)
from alignment_core.init.text import Said
from alignment_core.init.verifying import labels, verifier_of

GENERATIONS = 8


def fits(rows: Sequence[Mapping[str, Any]], found: ColumnMapping) -> bool:
    """Bare answers that can be verified, and no other column with something to imitate."""
    column = found.columns.get("label")
    if column is None or verifier_of(labels(rows, found.columns), worked=False) is None:
        return False
    shown = reading(rows, "demonstrations", ("prompt_completion",), {})
    return shown is None or (shown.columns["completion"] == column and column != "completion")


def sections(facts: Profile) -> dict[str, Any]:
    rewards = reward_list(facts)
    if not rewards:
        rewards = [Said({"verifier": check_verified(facts, "rl")}, "1 for an answer that equals the label, else 0")]
    room = answers(facts)
    per_step = 64 if facts.machine.gpus else 16
    per_step = max(2, min(per_step, facts.rows.count // 4))
    taken = prompts(facts, facts.all_sources, room)
    learning = training(facts, 1e-6, 2e-4, epochs=False)
    learning["batch_size"] = Said(per_step * GENERATIONS, "completions in an optimiser step: all of a step")
    section = {
        "prompts": taken,
        "steps": Said(steps(facts, per_step), f"each takes the next {per_step} of {facts.rows.words}"),
        "prompts_per_step": per_step,
        "generation": generation(GENERATIONS, room),
        "rewards": rewards,
        "advantage": Said({"estimator": "group", "divide_by_deviation": True}, "GRPO"),
        "training": {**learning, "lr_scheduler_type": "constant"},
    }
    judged = evaluation(facts)
    if judged:
        judged["evaluation"]["generation"] |= generation(1, room)
        judged["evaluation"]["prompts"] |= {"max_length": taken["max_length"]}
    return {"rl": section, **judged}


def answers(facts: Profile) -> int:
    """Tokens of an answer that reasons before it ends."""
    if facts.model.is_scratch:
        return 32
    return min(512 if facts.machine.gpus else 256, max(16, (facts.model.context or 4096) // 2))


START = Start(
    ("prompts",),
    sections,
    "prompts with a right answer each, which a verifier can compare with",
    40,
    ("prompts",),
    fits,
    others=("ppo", "rloo", "reinforce", "reinforce-baseline", "rlhf"),
    instead="`--method grpo` writes GRPO, `align init --from ppo` (or rlhf, reinforce-baseline) copies a recipe",
)
