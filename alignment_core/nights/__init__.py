"""Nights: training that goes on from production with the rows that arrived since, each used once."""
