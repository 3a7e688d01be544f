"""Stages: pure functions (configuration, input artifacts) → one output artifact, one module per stage.

A stage module holds a ``STAGE`` and imports nothing heavy at its head: the flow process reads it to compute keys.
"""
