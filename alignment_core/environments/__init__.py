"""Environments, tools and agents: what answers a policy between its turns."""
