"""Ray: starting or joining a cluster, groups of actors, and the one object that knows about devices."""
