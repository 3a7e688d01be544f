"""Writes a first recipe for a user's model and rows: settings are inferred where possible."""
