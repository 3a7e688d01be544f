"""The user's Python: the part of it that counts in a key, its loading, and the processes in which it runs."""
