"""Views of lineage: text for terminals (trees, comparisons), plain data for programs."""

from __future__ import annotations

import json
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alignment_core.artifacts import Provenance, Reference
from alignment_core.canonical import digest_of
from alignment_core.lineage.diff import Difference, FileChange, Pair, Side, Upstream
from alignment_core.lineage.sources import Source, settings_of, sources_of
from alignment_core.lineage.tree import Branch, Gap, Tree

_METRICS_SHOWN = 4
_WIDTH = 120
_NARROWEST = 60
_LONGEST_SETTING = 60
_Entry = Branch | Gap | Source


def text_tree(tree: Tree, width: int = _WIDTH, everything: bool = False) -> str:
    """A tree with box-drawing characters: each artifact with its maker, roles on the edges, sources at the leaves.

    No line has more than ``width`` characters: where branches need more than half of them, the tree goes on at the margin.
    Without ``everything``, the middle of long chains is left out, see :meth:`Tree.shown`.
    """
    return "\n".join(_Text(tree, max(width, _NARROWEST), everything).lines())


def to_json(tree: Tree) -> dict[str, Any]:
    """The whole tree as plain data: its artifacts, the nearest first, each with its makers, and with what they used or, in a
    tree of what was made from it, with what used it."""
    edges = "inputs" if tree.upward else "used_by"
    return {
        "reference": str(tree.root),
        "artifacts": [
            {
                "reference": str(node.reference),
                "made_by": [_record_data(record, node.reference) for record in node.made_by],
                edges: [{"role": branch.role, "reference": str(branch.reference)} for branch in node.branches],
            }
            for node in tree.nodes.values()
        ],
    }


def diff_text(difference: Difference) -> str:
    """A comparison as text: the makers of both, then a section for each kind of difference."""
    a, b = difference.a, difference.b
    lines = [f"a  {_side_line(a)}", f"b  {_side_line(b)}"]
    if difference.identical:
        lines.append("identical: the same bytes")
    if difference.relation:
        lines.append(difference.relation)
    sections = {
        "key": difference.key,
        "inputs": _table([[pair.name, _value(pair.a), _value(pair.b)] for pair in difference.inputs]),
        "upstream": [line for stages in difference.upstream for line in _upstream_lines(stages)],
        "metrics": _table([_pair_cells(pair) for pair in difference.metrics]),
        "cost": _table([_pair_cells(pair) for pair in difference.cost]),
        "packages": _table([[pair.name, _value(pair.a), _value(pair.b)] for pair in difference.packages]),
        "hardware (not in the key; changes rounding)": _table(
            [[pair.name, _value(pair.a), _value(pair.b)] for pair in difference.hardware]
        ),
        "files": _table([_file_cells(change) for change in difference.files]),
    }
    for title, rows in sections.items():
        if rows:
            lines += ["", title, *(f"  {row}" for row in rows)]
    return "\n".join(lines)


def _side_line(side: Side) -> str:
    if not side.stage:
        return f"{side.reference.short}  made outside: no record"
    return f"{side.reference.short}  by {side.label} ({side.stage})  {side.finished_at[:19]}".rstrip()


def _upstream_lines(stages: Upstream) -> Iterator[str]:
    labels = stages.b.label if stages.a.label == stages.b.label else f"{stages.a.label} and {stages.b.label}"
    yield f"{stages.role}, by {labels}"
    yield from (f"  {change}" for change in stages.key)


def _pair_cells(pair: Pair) -> list[str]:
    return [pair.name, _value(pair.a), _value(pair.b), "" if pair.difference is None else f"{pair.difference:+.4g}"]


def _file_cells(change: FileChange) -> list[str]:
    cells = [change.path]
    for size, digest in ((change.size_a, change.sha256_a), (change.size_b, change.sha256_b)):
        cells.append(f"{size:,} bytes {digest[:12]}" if digest else "—")
    return cells


def _value(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, str) and "@sha256:" in value:
        return Reference.parse(value).short
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(rows: list[list[str]]) -> list[str]:
    """Aligned lines ``name  a → b  difference``; the last column may be missing."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lines = []
    for name, a, b, *rest in rows:
        line = f"{name:<{widths[0]}}  {a:>{widths[1]}} → {b:>{widths[2]}}"
        lines.append("  ".join([line, *(f"{cell:>{widths[3]}}" for cell in rest)]).rstrip())
    return lines


@dataclass(frozen=True)
class _Margin:
    """What stands before a subtree: ``lead`` before its first line, ``follow`` before the others."""

    lead: str
    follow: str


class _Text:
    """A tree as lines of text."""

    def __init__(self, tree: Tree, width: int, everything: bool) -> None:
        self.tree = tree
        self.width = width
        self.everything = everything
        self.shown = set(tree.nodes if everything else tree.visible())
        self.printed = set[Reference]()
        self.records = set[str]()
        """Keys of the records whose details are above."""
        self.below = deque[Reference]()
        """Artifacts whose branches had no room, and follow at the margin."""

    def lines(self) -> Iterator[str]:
        yield from self._entry(Branch("", self.tree.root, repeated=False), _Margin("", ""))
        yield from self._subtree(self.tree.root, _Margin("", ""))
        while self.below:
            reference = self.below.popleft()
            yield from ("", f"{reference.short}  (continued)")
            yield from self._subtree(reference, _Margin("", ""))

    def _subtree(self, reference: Reference, margin: _Margin) -> Iterator[str]:
        """What lies below an artifact. A tree may be thousands of artifacts deep, so there is no recursion."""
        waiting = self._inside(self._onward(reference), margin)
        while waiting:
            entry, margin = waiting.pop()
            yield from self._entry(entry, margin)
            if isinstance(entry, Gap):
                waiting += self._inside([entry.then] if entry.then else [], margin)
            elif isinstance(entry, Branch) and not entry.repeated and (onward := self._onward(entry.reference)):
                if len(margin.follow) > self.width // 2:
                    yield f"{margin.follow}└─ …  (continued below)"
                    self.below.append(entry.reference)
                else:
                    waiting += self._inside(onward, margin)

    def _inside(self, entries: Sequence[_Entry], margin: _Margin) -> list[tuple[_Entry, _Margin]]:
        """Entries with their margins, the first one last."""
        middle = _Margin(f"{margin.follow}├─ ", f"{margin.follow}│  ")
        last = _Margin(f"{margin.follow}└─ ", f"{margin.follow}   ")
        return [(entry, middle if number else last) for number, entry in enumerate(reversed(entries))]

    def _entry(self, entry: _Entry, margin: _Margin) -> Iterator[str]:
        yield from self._wrapped(margin, self._title(entry))
        if isinstance(entry, Branch) and not entry.repeated:
            inner = margin.follow + ("│    " if self._onward(entry.reference) else "     ")
            yield from self._details(entry.reference, _Margin(inner, inner))

    def _onward(self, reference: Reference) -> list[_Entry]:
        node = self.tree.nodes[reference]
        return [*node.sources, *(node.branches if self.everything else self.tree.shown(reference))]

    def _title(self, entry: _Entry) -> str:
        if isinstance(entry, Source):
            return _source_line(entry)
        if isinstance(entry, Gap):
            return f"… {entry.count} {entry.what} (--all shows them)"
        again = ""
        if entry.repeated:
            where = "above" if entry.reference in self.printed else "below" if entry.reference in self.shown else ""
            again = f"  (shown {where})" if where else "  (left out with its round)"
        self.printed.add(entry.reference)
        return (f"{entry.role}: " if entry.role else "") + entry.reference.short + again

    def _details(self, reference: Reference, margin: _Margin) -> Iterator[str]:
        made_by = self.tree.nodes[reference].made_by
        for record in made_by:
            lines = list(_record_lines(record, reference))
            for line in lines[:1] if record.key in self.records else lines:
                yield from self._wrapped(margin, line)
            self.records.add(record.key)
        if not made_by:
            yield f"{margin.lead}made outside: no record"

    def _wrapped(self, margin: _Margin, text: str) -> Iterator[str]:
        width = self.width - len(margin.lead)
        parts = (
            [text] if len(text) <= width else textwrap.wrap(text, width, break_on_hyphens=False, subsequent_indent="  ")
        )
        yield from (f"{margin.follow if number else margin.lead}{part}" for number, part in enumerate(parts))


def _record_lines(record: Provenance, made: Reference) -> Iterator[str]:
    names = record.names_of(made) if len(record.outputs) > 1 else []
    output = f", output{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
    yield f"by {record.label} ({record.stage}){output}, seed {record.seed}, {record.seconds:.1f} s"
    yield f"config {digest_of(record.config)[:12]}, code {record.code_version or 'unknown'}"
    if record.described_by:
        yield ", ".join(f"{role} {reference.digest[:12]}" for role, reference in record.described_by.items())
    for role, packages in record.accepted.items():
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        yield f"accepted input {role}, though it was made with {versions} (reuse_across_versions)"
    settings = ", ".join(f"{path} {_setting(value)}" for path, value in settings_of(record).items())
    if settings:
        yield settings
    numbers = [(name, value) for name, value in record.metrics.items() if _is_number(value)]
    if numbers:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers[:_METRICS_SHOWN])
        more = len(record.metrics) - min(len(numbers), _METRICS_SHOWN)
        yield shown + (f" and {more} more" if more else "")


def _source_line(source: Source) -> str:
    rows = f", {source.rows} rows" if source.rows is not None else ""
    digest = f", sha256 {source.sha256[:12]}" if source.sha256 else ""
    commit = f", commit {source.commit}" if source.commit else ""
    version = f", version {source.version}" if source.version else ""
    settings = "".join(f", {path} {_setting(value)}" for path, value in source.settings)
    return f"source: {source.path}{rows}{digest}{commit}{version}{settings}"


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join((text if len(text) <= _LONGEST_SETTING else text[: _LONGEST_SETTING - 1] + "…").split())


def _record_data(record: Provenance, output: Reference) -> dict[str, Any]:
    data = record.model_dump(mode="json")
    return data | {
        "as": record.names_of(output),
        "config_digest": digest_of(record.config),
        "settings": settings_of(record),
        "sources": [{**vars(source), "settings": dict(source.settings)} for source in sources_of(record)],
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
