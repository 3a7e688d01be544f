"""Flows: compositions of tasks, each readable on one screen, and the ``align`` command."""
