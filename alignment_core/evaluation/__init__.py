"""Evaluation: statistics with intervals, and the gates that a promotion must pass."""
