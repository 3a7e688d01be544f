"""Lineage: from a model back to the rows, configurations, code and parents that made it, and forward again."""

from alignment_core.lineage.diff import Difference, compare
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.render import diff_text, text_tree, to_json
from alignment_core.lineage.sources import Source
from alignment_core.lineage.tree import Tree

__all__ = ["Difference", "Graph", "Source", "Tree", "compare", "diff_text", "text_tree", "to_json"]
