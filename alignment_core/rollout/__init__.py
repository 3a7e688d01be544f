"""Rollout: sampling in turn with training or ahead of it, what is sampled as tables, and pairs from it. Token in, token out."""
