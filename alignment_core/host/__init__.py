"""The run host: one warm process per run that executes stages, under a supervisor that leaves nothing behind."""
