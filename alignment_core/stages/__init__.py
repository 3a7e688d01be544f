"""Stages: pure functions (configuration, input artifacts) → named output artifacts, one module per stage.

A stage module holds a ``STAGE`` and imports nothing heavy at its head: the flow process reads it to compute keys.
"""
