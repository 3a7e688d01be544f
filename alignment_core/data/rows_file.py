"""Artifacts that hold rows, before any tokenizer."""

ROWS = "rows.jsonl"
"""The file in an input artifact of the role ``rows``, which then stands for the sources: rows of the kind, in its native
format."""
