"""The execution of a stage: its key, the use of devices, retries, cost. A stage itself depends only on :mod:`.base`."""
