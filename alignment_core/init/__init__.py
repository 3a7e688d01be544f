"""A first recipe for somebody's own model and rows: what can be found out is found out, and written down to be edited."""
