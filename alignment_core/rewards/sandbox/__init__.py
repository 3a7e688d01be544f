"""Programs that nobody has read, run within limits."""
