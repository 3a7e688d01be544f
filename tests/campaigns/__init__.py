"""Campaigns against the store: many faults by chance, a seed that repeats them, and one figure each."""
