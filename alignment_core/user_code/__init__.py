"""The user's Python: what of it a key counts, how it is loaded, and the process in which it runs."""
