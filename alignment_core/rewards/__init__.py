"""Rewards of completions, one module per kind, and the handling of completions without a reward."""
