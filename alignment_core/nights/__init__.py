"""Nights: continued training of production on the rows that arrived since, each used once."""
