"""Prefect tasks: one for every stage, and promotion and publication of a policy. No machine learning here."""
