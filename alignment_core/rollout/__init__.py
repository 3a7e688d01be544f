"""Rollout: vLLM engines, sampling in shards, scoring, and the selection of preference pairs. Token in, token out."""
