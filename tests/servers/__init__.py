"""Servers that tests start on loopback and end themselves."""
