"""Provenance, bills of materials and signatures of artifacts, for people outside, and publishing on the Hub."""
