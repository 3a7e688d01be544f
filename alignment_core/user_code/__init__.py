"""The user's Python: what of it counts in a key, how it is loaded, and the processes in which it runs."""
