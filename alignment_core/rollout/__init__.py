"""Rollouts: samplers, advantages, trajectories, tables of completions, and preference pairs from them. Token in, token out."""
