"""Verifiers that recipes know by name, one module each."""
