"""Untrusted programs, run within limits."""
