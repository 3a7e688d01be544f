"""The report of a run in its folder: ``report.md`` with its figures beside it, and all of it in one ``report.html``.

It is a view for people: the store's artifact ``report`` has the numbers. Parts that can no longer be read are left out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan
from pathlib import Path

from alignment_core import journal
from alignment_core.artifacts import Reference, Store
from alignment_core.artifacts.attachments import attachment
from alignment_core.errors import AlignmentError
from alignment_core.execution.base import StageResult, shows_of
from alignment_core.execution.cost import PARTS
from alignment_core.execution.curve import CURVE, NOT_FINITE, Curve
from alignment_core.host.progress_log import headline
from alignment_core.lineage.graph import Graph
from alignment_core.lineage.samples import Row, compared, text_of, without_comparison
from alignment_core.printable import markdown_line, printable
from alignment_core.reporting.curves import over_policies, over_steps
from alignment_core.reporting.head import head
from alignment_core.reporting.picture import picture
from alignment_core.reporting.results import HEAD, result_rows
from alignment_core.stages.report import columns_of
from alignment_core.tracking.metrics_file import Points, points_of, read_points

MARKDOWN, PAGE = "report.md", "report.html"
SECTION_KIND, SECTION = "section", "section.md"
SAMPLES = 6
"""Prompts of which the report shows text."""
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; max-width: 62em; margin: 0 auto; padding: 1em; }
table { border-collapse: collapse; } td, th { padding: 0.15em 0.8em; border-bottom: 1px solid #dde2e7; text-align: left; }
pre { background: #f4f6f8; padding: 0.6em; white-space: pre-wrap; } img { max-width: 100%; }
p { overflow-x: auto; } img[alt=lineage] { max-width: none; }
"""


@dataclass
class RunReport:
    """Markdown, and its SVG figures by file name."""

    lines: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)
    texts: list[Row] = field(default_factory=list)
    """The rows of text in it."""

    def say(self, *lines: str) -> None:
        """Add lines and an empty one."""
        self.lines += [*lines, ""]

    def show(self, name: str, what: str, svg: str | None) -> None:
        """Add a picture, if there is one."""
        if svg is not None:
            self.pictures[f"{name}.svg"] = svg
            self.say(f"![{what}]({name}.svg)")

    @property
    def markdown(self) -> str:
        return printable("\n".join(self.lines))

    @property
    def html(self) -> str:
        """One self-contained page: no script, no other file, no network."""
        from markdown_it import MarkdownIt

        body = str(MarkdownIt("commonmark", {"html": False}).enable("table").render(self.markdown))

        def inline(match: re.Match[str]) -> str:
            encoded = base64.b64encode(self.pictures[match.group(1)].encode()).decode()
            return f'src="data:image/svg+xml;base64,{encoded}"'

        pictures = "|".join(map(re.escape, self.pictures)) or "(?!)"
        body = re.sub(f'src="({pictures})"', inline, body)
        return (
            f'<!doctype html><html><head><meta charset="utf-8"><style>{STYLE}</style></head><body>{body}</body></html>'
        )

    def write(self, folder: Path) -> Path:
        """Write all of it into the run's folder; the path of the Markdown."""
        for name, content in {**self.pictures, PAGE: self.html, MARKDOWN: self.markdown}.items():
            (folder / name).write_text(content)
        return folder / MARKDOWN


def run_report(
    store: Store,
    name: str,
    run_id: str,
    results: Sequence[StageResult],
    outputs: Mapping[str, Reference],
    promotion: str | None = None,
    notes: Sequence[str] = (),
    failed: Mapping[str, str] = {},
) -> RunReport:
    """The report of a run with the ``results`` of its stages, in order; ``promotion`` is a line about the decision, ``failed``
    has the reasons, by label, of stages that failed without ending the run."""
    report = RunReport()
    report.say(f"# Run {name}", "", f"Run `{run_id}`.", "", *head(run_id))
    for note in notes:
        report.say(f"**Warning:** {markdown_line(note)}")
    if promotion:
        report.say(*fenced({"promotion": promotion}))
    if failed:
        report.say("## Failed", *fenced(dict(failed)))
    of_stages(report, store, run_id, results)
    report.say("## Stages", "", *table(STAGE_HEAD, stage_rows(results)))
    report.say("## Where the outputs come from")
    report.say(*(f"- {role}: `{reference}`" for role, reference in outputs.items()))
    with Graph.of(store) as graph:
        report.show("lineage", "lineage", picture(graph, outputs.values()))
    return report


def of_stages(report: RunReport, store: Store, run_id: str, results: Sequence[StageResult]) -> None:
    """Add the stages' warnings, policies, curves (also of unfinished stages) and text."""
    for result in results:
        for sentence in result.warnings:
            report.say(f"**Warning:** {result.label}: {markdown_line(sentence)}")
    for label, line in journal.stages(run_id).items():
        for sentence in line.restarts:
            report.say(f"**Warning:** {label}: {markdown_line(sentence)}")
    _policies(report, store, results)
    _sections(report, store, results)
    _curves(report, store, run_id, results)
    _text(report, store, run_id)


def _policies(report: RunReport, store: Store, results: Sequence[StageResult]) -> None:
    for name, comparison in comparisons_of(results).items():
        title, figure = f"## Policies on held-out prompts: {name}", f"policies-{name.replace('/', '-')}"
        if not name:
            title, figure = "## Policies on held-out prompts", "policies"
        with suppress(OSError, AlignmentError):
            _, *lines = (store.fetch(comparison.reference) / MARKDOWN).read_text().splitlines()
            report.say(title, *lines)
        policies = policies_of(store, comparison)
        report.show(figure, "metrics of the policies", over_policies(dict(columns_of(policies)), policies))


def comparisons_of(results: Iterable[StageResult]) -> dict[str, StageResult]:
    """The tables of a run's policies: of the run as a whole under the empty name, of its branches under their names."""
    tables: dict[str, StageResult] = {}
    for result in results:
        if result.stage == "report":  # the comparison for a promotion comes last, and has the other policies, too
            branch = result.label.rpartition("/")[0]
            tables["" if branch == "promotion" else branch] = result
    return tables


def _sections(report: RunReport, store: Store, results: Sequence[StageResult]) -> None:
    """Artifacts of the kind ``section``, which stages wrote for reports: the last one of each kind of stage in each branch."""
    last = {(each.stage, _branch_of(each.label)): each for each in results if each.reference.kind == SECTION_KIND}
    for (_, branch), result in last.items():
        with suppress(OSError, AlignmentError):
            title, *lines = (store.fetch(result.reference) / SECTION).read_text().split("\n")
            report.say("\n".join([f"{title}: {branch}" if branch else title, *lines]))


def _branch_of(label: str) -> str:
    """The branch of a stage in a round or outside of one, by its label; empty for a stage of the run itself."""
    return re.sub(r"(^|/)((round-\d+|[^/]+/evaluation)/)?[^/]*$", "", label)


def policies_of(store: Store, result: StageResult) -> dict[str, dict[str, float]]:
    """The metrics of the policies that a report's stage compared, in the order of its configuration: a record sorts them by
    name. NaN for metrics that are not finite."""
    metrics: dict[str, dict[str, float]] = result.metrics.get("policies", {})
    record = store.records.by_key([result.key]).get(result.key)
    order = record.config["policies"] if record else metrics
    return {
        label: {name: nan if value in NOT_FINITE else value for name, value in metrics[label].items()}
        for label in order
    }


def _curves(report: RunReport, store: Store, run_id: str, results: Sequence[StageResult]) -> None:
    """A figure for each kind of stage that reported key metrics while it ran, with all its rounds."""
    kinds: dict[str, dict[str, Points]] = {}
    stages = {
        **{label: line.stage for label, line in journal.stages(run_id).items()},
        **{r.label: r.stage for r in results},
    }
    here = read_points(journal.folder_of(run_id))
    cached = {result.label: result.reference for result in results if result.state != "run"}
    for label, kind in stages.items():
        points = _saved_points(store, cached[label]) if label in cached else here.get(label)
        if points:
            kinds.setdefault(kind, {})[label] = points
    pictures = {kind: over_steps(shows_of(kind), points) for kind, points in kinds.items()}
    if any(pictures.values()):
        report.say("## Curves")
    for kind, drawn in pictures.items():
        if drawn is not None:
            report.say(f"### {', '.join(kinds[kind])}")
            report.show(f"curves-{kind.replace('_', '-')}", kind.replace("_", " "), drawn)
            last = next((result for result in reversed(results) if result.label in kinds[kind]), None)
            if last is not None:
                report.say(*metric_table(last))


def _saved_points(store: Store, reference: Reference) -> Points:
    """The reports of the stage that made an artifact, from the curve that is attached to it."""
    with suppress(OSError, AlignmentError):
        if (saved := attachment(store, reference, CURVE)) is not None:
            return points_of(Curve.from_bytes(saved))
    return []


def _text(report: RunReport, store: Store, run_id: str) -> None:
    lines = journal.stages(run_id)
    with suppress(OSError, AlignmentError):
        _, rows = compared(store, lines, SAMPLES)
        title = "## Held-out prompts, and what each policy answered"
        if not rows:
            label, rows = without_comparison(store, lines, SAMPLES)
            title = f"## Completions of {label}"
        if rows:
            report.texts = rows
            report.say(title)
            for row in rows:
                report.say(*fenced(row))


def fenced(row: Row) -> list[str]:
    """A row's texts as a code block with a fence that is longer than any in them."""
    text = "\n".join(f"{name}: {text_of(value)}" for name, value in row.items())
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", text, fence]


STAGE_HEAD = ("stage", "state", *PARTS.values(), "key metrics")
"""Head of the table of stages; times in seconds."""


def time_cells(result: StageResult) -> list[str]:
    """Seconds of start-up, waiting and work of a stage that ran."""
    values = {**result.cost, "seconds": result.seconds} if result.state == "run" else {}
    return [f"{values[name]:.1f}" if values.get(name, 0.0) >= 0.05 else "" for name in PARTS]


def metric_table(result: StageResult) -> list[str]:
    """The final metrics of a stage as a Markdown table."""
    groups = result_rows(result.metrics)
    rows = [
        (group if number == 0 else "", *cells)
        for group, listed in groups.items()
        for number, cells in enumerate(listed)
    ]
    return table((result.label, *HEAD), rows)


def stage_rows(results: Iterable[StageResult]) -> list[tuple[str, ...]]:
    """Cells of a table with the head STAGE_HEAD."""
    return [
        (
            result.label,
            result.state,
            *time_cells(result),
            " · ".join(filter(None, (headline(shows_of(result.stage), result.metrics), result.made_with))),
        )
        for result in results
    ]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A Markdown table."""
    titles = list(head)
    lines = [f"| {' | '.join(map(markdown_line, cells))} |" for cells in (titles, *rows)]
    return [lines[0], "|---" * len(titles) + "|", *lines[1:]]
