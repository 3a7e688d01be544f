"""What the stage's outputs and key metrics are called, and where the recipe has its rewards."""

from __future__ import annotations

POLICY, AVERAGE, BEST, CRITIC, TRAJECTORIES = "policy", "average", "best", "critic", "trajectories"
"""Outputs."""
SHOWS = {"reward": "reward", "kl": "KL", "completion_length": "length", "critic_loss": "critic loss"}
"""The metrics that stand for the stage."""
FIELD = "rl.rewards"
