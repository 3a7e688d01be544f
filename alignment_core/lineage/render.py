"""Views of lineage: text for terminals (trees, comparisons), plain data for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from alignment_core.artifacts import Provenance, Reference
from alignment_core.canonical import digest_of
from alignment_core.lineage.diff import Difference, FileChange, Pair, Side, Upstream
from alignment_core.lineage.graph import Node
from alignment_core.lineage.sources import Source, settings_of, sources_of

_METRICS_SHOWN = 4
_WIDTH = 100
"""Characters of a line of settings, without the branches before it."""
_LONGEST_SETTING = 60


def text_tree(node: Node) -> str:
    """A tree with box-drawing characters: each artifact with its maker, roles on the edges, sources at the leaves."""
    return "\n".join(_lines(node, "", "", set()))


def to_json(node: Node) -> dict[str, Any]:
    """The same content as ``text_tree`` as plain data."""
    return {
        "reference": str(node.reference),
        "role": node.role or None,
        "repeated": node.repeated,
        "made_by": [] if node.repeated else [_record_data(record, node.reference) for record in node.made_by],
        "children": [to_json(child) for child in node.children],
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


def _lines(node: Node, first: str, rest: str, shown_keys: set[str]) -> Iterator[str]:
    """The lines of a subtree: the first with the prefix ``first``, the others with ``rest``. Records whose keys are in
    ``shown_keys`` are shortened."""
    role = f"{node.role}: " if node.role else ""
    again = "  (shown above)" if node.repeated else ""
    yield f"{first}{role}{node.reference.short}{again}"
    if node.repeated:
        return
    branches: list[Source | Node] = [*node.sources, *node.children]
    margin = rest + ("│    " if branches else "     ")
    for record in node.made_by:
        lines = list(_record_lines(record, node.reference))
        yield from (margin + line for line in (lines[:1] if record.key in shown_keys else lines))
        shown_keys.add(record.key)
    if not node.made_by:
        yield margin + "made outside: no record"
    for number, branch in enumerate(branches, start=1):
        last = number == len(branches)
        lead, follow = rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
        if isinstance(branch, Source):
            yield lead + _source_line(branch)
        else:
            yield from _lines(branch, lead, follow, shown_keys)


def _record_lines(record: Provenance, made: Reference) -> Iterator[str]:
    names = record.names_of(made) if len(record.outputs) > 1 else []
    output = f", output{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
    yield f"by {record.label} ({record.stage}){output}, seed {record.seed}, {record.seconds:.1f} s"
    yield f"config {digest_of(record.config)[:12]}, code {record.code_version or 'unknown'}"
    for role, packages in record.accepted.items():
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        yield f"accepted input {role}, though it was made with {versions} (reuse_across_versions)"
    settings = ", ".join(f"{path} {_setting(value)}" for path, value in settings_of(record).items())
    yield from textwrap.wrap(settings, _WIDTH, break_long_words=False, break_on_hyphens=False)
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
