"""Flows of one's own over the project's tasks, and what plug-ins are made of: what is here by name is what may be built on."""
