"""Nights: continued training of production on the rows that arrived since, each used once."""

BATCH = "preference-batch"
"""Stage, and kind of artifact, of the rows that a night takes."""
