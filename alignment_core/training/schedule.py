"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from alignment_core.recipes import TrainingConfig

DECAYS = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
}
"""Remaining fraction of the distance from the peak to the floor after the fraction ``done`` of the decay."""


def whole_steps(part: float, steps: int) -> int:
    """A part of so many steps, or some times as many: of a fraction the next whole number, as the ``Trainer`` of
    ``transformers`` counts steps of epochs and of the warm-up."""
    return math.ceil(round(part * steps, 6))  # 1.1 times 10 is above 11 in floating point


def learning_rate(config: TrainingConfig, step: int, total_steps: int, first_step: int = 0) -> float:
    """Learning rate of step ``step`` (from 0) of ``total_steps``: linear warm-up, then decay to the floor at the last step.

    A model that is not trained before ``first_step`` warms up from there, over as many steps as any other (as in OpenRLHF with
    ``freezing_actor_steps`` and in verl with ``critic_warmup``, whose schedulers count updates of the policy).

    ``wsd`` (warm-up, stable, decay: Hu et al. 2024, "MiniCPM: Unveiling the Potential of Small Language Models with Scalable
    Training Strategies", section 4.2) stays at the peak up to the last ``decay_ratio`` of all steps. They decay linearly, or
    with 1 − √done (Hägele et al. 2024, "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations").
    """
    warmup = config.warmup_steps or whole_steps(config.warmup_ratio, total_steps)
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_ratio
    warm = first_step + warmup
    if step < warm:
        return peak * (step - first_step + 1) / (warmup + 1)
    kind = config.lr_scheduler_type
    if kind == "constant":
        return peak
    start = max(warm, total_steps - round(config.decay_ratio * total_steps)) if kind == "wsd" else warm
    if step < start:
        return peak
    done = (step - start) / max(1, total_steps - start)
    left = DECAYS[config.decay_type if kind == "wsd" else kind](done)
    return floor + (peak - floor) * left
