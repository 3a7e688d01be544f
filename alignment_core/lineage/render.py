"""Views of the lineage graph: a text tree for terminals, plain data for programs, Mermaid for documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from alignment_core.artifacts import Provenance, Reference
from alignment_core.canonical import digest_of
from alignment_core.lineage.graph import Graph, Node, Source, sources_of

_METRICS_SHOWN = 4


def text_tree(node: Node) -> str:
    """A tree with box-drawing characters: each artifact with its maker, roles on the edges, sources at the leaves."""
    return "\n".join(_lines(node, "", ""))


def to_json(node: Node) -> dict[str, Any]:
    """The same content as ``text_tree`` as plain data."""
    return {
        "reference": str(node.reference),
        "role": node.role or None,
        "repeated": node.repeated,
        "made_by": [] if node.repeated else [_record_data(record) for record in node.made_by],
        "children": [to_json(child) for child in node.children],
    }


def mermaid(graph: Graph, references: Iterable[Reference]) -> str:
    """A Mermaid flowchart of everything upstream of ``references``: stages as boxes, artifacts as rounded nodes."""
    artifacts: dict[Reference, None] = dict.fromkeys(references)
    wanted = set(artifacts)
    stages: dict[str, Provenance] = {}
    waiting = list(artifacts)
    while waiting:
        for record in graph.made_by(waiting.pop()):
            if stages.setdefault(record.key, record) is record:
                new = [used for used in record.inputs.values() if used not in artifacts]
                artifacts |= dict.fromkeys(new)
                waiting += new
    lines = ["flowchart TD"]
    for reference in sorted(artifacts):
        lines.append(f'    {_id(reference)}(["{reference.kind}<br/>{reference.digest[:12]}"])')
    for key, record in sorted(stages.items(), key=lambda item: (item[1].started_at, item[0])):
        stage = f"s{key[:16]}"
        lines.append(f'    {stage}["{_escaped(record.label)}"]')
        for role, used in sorted(record.inputs.items()):
            lines.append(f'    {_id(used)} -->|"{_escaped(role)}"| {stage}')
        for number, source in enumerate(sources_of(record)):
            lines.append(f'    {stage}f{number}[("{_escaped(source.path)}")] --> {stage}')
        lines.append(f"    {stage} --> {_id(record.output)}")
    for reference in sorted(wanted):
        lines.append(f"    style {_id(reference)} stroke-width:3px")
    return "\n".join(lines) + "\n"


def _lines(node: Node, first: str, rest: str) -> Iterator[str]:
    """The lines of a subtree; ``first`` leads the first line, ``rest`` the others."""
    role = f"{node.role}: " if node.role else ""
    again = "  (shown above)" if node.repeated else ""
    yield f"{first}{role}{node.reference.short}{again}"
    if node.repeated:
        return
    branches: list[Source | Node] = [*node.sources, *node.children]
    margin = rest + ("│    " if branches else "     ")
    for record in node.made_by:
        for line in _record_lines(record):
            yield margin + line
    if not node.made_by:
        yield margin + "made outside: no record"
    for number, branch in enumerate(branches, start=1):
        last = number == len(branches)
        lead, follow = rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
        if isinstance(branch, Source):
            yield lead + _source_line(branch)
        else:
            yield from _lines(branch, lead, follow)


def _record_lines(record: Provenance) -> Iterator[str]:
    yield f"by {record.label} ({record.stage}), seed {record.seed}, {record.seconds:.1f} s"
    yield f"config {digest_of(record.config)[:12]}, code {record.code_version or 'unknown'}"
    numbers = [(name, value) for name, value in record.metrics.items() if _is_number(value)]
    if numbers:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in numbers[:_METRICS_SHOWN])
        more = len(record.metrics) - min(len(numbers), _METRICS_SHOWN)
        yield shown + (f" and {more} more" if more else "")


def _source_line(source: Source) -> str:
    rows = f", {source.rows} rows" if source.rows is not None else ""
    digest = f", sha256 {source.sha256[:12]}" if source.sha256 else ""
    return f"source: {source.path}{rows}{digest}"


def _record_data(record: Provenance) -> dict[str, Any]:
    data = record.model_dump(mode="json")
    return data | {
        "config_digest": digest_of(record.config),
        "sources": [vars(source) for source in sources_of(record)],
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _id(reference: Reference) -> str:
    return f"a{reference.digest[:16]}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace("\n", " ")
