"""Prefect tasks: one module per kind of stage, with its retries and cache key. No machine learning here."""
