"""Prefect flows: runs of recipes, deployments and schedules, and the ``align`` command."""
