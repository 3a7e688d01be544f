"""What runs a stage: its key, who may use the devices, retries, cost. A stage itself knows only :mod:`.base`."""
