"""What the stage's outputs and key metrics are called, and where the recipe has its rewards."""

from __future__ import annotations

from alignment_core.evaluation.metric_names import titles

POLICY, AVERAGE, BEST, CRITIC, TRAJECTORIES = "policy", "average", "best", "critic", "trajectories"
"""Outputs."""
SHOWS = titles("reward", "kl", "completion_length", "critic_loss")
"""The metrics that stand for the stage."""
FIELD = "rl.rewards"
