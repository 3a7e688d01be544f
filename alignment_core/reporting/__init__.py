"""The report of a run for people: tables, curves, text and lineage, as Markdown and as one HTML page."""
