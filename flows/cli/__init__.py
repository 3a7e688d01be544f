"""The ``align`` command: each module parses, calls and prints for one group of commands."""
