"""Prefect tasks: one module per kind of stage, with its retries, cache key and tags. No machine learning here."""
