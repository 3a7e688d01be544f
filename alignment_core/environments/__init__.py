"""Environments, tools and agents, which respond to a policy between its turns."""
