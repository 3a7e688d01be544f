"""Rewards: what gives a completion a number, one module per kind, and what becomes of completions without one."""
